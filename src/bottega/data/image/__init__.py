"""Images: from files to pixels, and from pixels to batches."""
