"""Bottega: train models in every medium from one recipe file."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "crossval", "evaluate", "load", "predict", "prepare", "train"]


def __getattr__(name: str) -> Any:
    """Fetched on first use: importing bottega must not import torch, and preparing data never does."""
    if name == "prepare":
        from bottega import preparation

        return preparation.prepare
    if name == "crossval":
        from bottega.insight.crossval import crossval

        return crossval
    if name == "evaluate":
        from bottega.insight.evaluate import evaluate

        return evaluate
    if name == "predict":
        from bottega.insight.predict import predict

        return predict
    if name in ("load", "train"):
        from bottega import run

        return getattr(run, name)
    raise AttributeError(f"module 'bottega' has no attribute {name!r}")
