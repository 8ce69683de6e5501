"""Text classifiers: a linear model over hashed n-grams, a transformer encoder, Kim's convolutional network, and pretrained encoders."""
