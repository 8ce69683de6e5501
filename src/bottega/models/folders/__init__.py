"""Folders and files of pretrained models: where they are found, what they may not hold, and how they are read."""
