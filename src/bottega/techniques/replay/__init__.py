"""Replay over a sequence of sources."""
