"""Alignment of images and captions (CLIP)."""
