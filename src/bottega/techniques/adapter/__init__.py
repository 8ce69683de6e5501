"""Bottleneck adapters behind the outputs of a model's blocks."""
