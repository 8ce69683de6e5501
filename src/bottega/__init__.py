"""Bottega: train models in every medium from one recipe file."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "load", "train"]


def __getattr__(name: str) -> Any:
    """`train` and `load` come from run.py on first use: importing bottega must not import torch."""
    if name in ("load", "train"):
        from bottega import run

        return getattr(run, name)
    raise AttributeError(f"module 'bottega' has no attribute {name!r}")
