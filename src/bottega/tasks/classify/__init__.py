"""Classification of text, images, audio and video."""
