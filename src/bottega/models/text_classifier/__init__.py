"""Classifiers of text: our own encoder, Kim's network, and pretrained encoders."""
