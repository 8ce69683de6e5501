"""Text classifiers: a transformer encoder, Kim's convolutional network, and pretrained encoders."""
