"""Bottega: train models in every medium from one recipe file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bottega.data.augment_sample import augment
    from bottega.insight.crossval import crossval
    from bottega.insight.evaluate import evaluate
    from bottega.insight.library import compare, lr_find, plan, runs
    from bottega.insight.predict import predict
    from bottega.preparation import prepare
    from bottega.run import load, train

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "augment",
    "compare",
    "crossval",
    "evaluate",
    "load",
    "lr_find",
    "plan",
    "predict",
    "prepare",
    "runs",
    "train",
]

_MODULES = {
    "augment": "data.augment_sample",
    "compare": "insight.library",
    "crossval": "insight.crossval",
    "evaluate": "insight.evaluate",
    "load": "run",
    "lr_find": "insight.library",
    "plan": "insight.library",
    "predict": "insight.predict",
    "prepare": "preparation",
    "runs": "insight.library",
    "train": "run",
}
"""Call -> the module that has it."""


def __getattr__(name: str) -> Any:
    """Fetched on first use: importing bottega must not import torch, and preparing data never does."""
    if name in _MODULES:
        return getattr(import_module(f"bottega.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'bottega' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The library's calls, which are not here before their first use, for shells and editors."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
