"""Audio: decoding, preprocessing, augmentation, spectrograms and output files."""
