"""Losses that are fused with a model's head, and what their callers share."""

IGNORE_INDEX = -100
"""Target of tokens that are not predicted."""
