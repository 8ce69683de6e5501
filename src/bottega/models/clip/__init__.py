"""CLIP: an image encoder and a text encoder that share one space."""
