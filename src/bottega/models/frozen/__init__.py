"""Frozen pretrained models: language models, image generators, captioners."""
