"""Continual learning: sources trained in sequence, metrics per source, and forgetting."""
