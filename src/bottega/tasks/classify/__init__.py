"""Classification of text, images, sound and video."""
