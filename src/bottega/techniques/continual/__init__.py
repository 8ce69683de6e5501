"""Continual learning: sources one after the other, replay, and what is forgotten."""
