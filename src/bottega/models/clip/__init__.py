"""CLIP: an image encoder and a text encoder with a shared embedding space."""
