"""Techniques, one folder each: config.py (options, conflicts), apply.py (recipe and data), torch.py (computation)."""
