"""Video: from files to frames, and from frames to batches."""
