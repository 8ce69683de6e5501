"""Losses that are fused with the layer before them."""
