"""Video: decoding, frame sampling, and output files."""
