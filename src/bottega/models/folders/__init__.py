"""Folders of pretrained models: resolving names to folders, safety checks, and loading."""
