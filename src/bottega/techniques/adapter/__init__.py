"""Adapters: narrow layers behind the outputs of a model's blocks."""
