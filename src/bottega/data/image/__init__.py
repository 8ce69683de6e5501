"""Images: decoding, resizing, augmentation, and output files."""
