"""Techniques: one folder each, with config.py (options, conflicts), apply.py (recipe and data) and torch.py (what it computes)."""
