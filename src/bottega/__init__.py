"""Bottega: train models in every medium from one recipe file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bottega.analysis.crossval import crossval
    from bottega.analysis.diagnose import diagnose
    from bottega.analysis.evaluate import evaluate
    from bottega.analysis.library import compare, doctor, lr_find, plan, runs
    from bottega.analysis.predict import predict
    from bottega.analysis.report import report
    from bottega.data.augment_sample import augment
    from bottega.run.prepare import prepare
    from bottega.run.train import load, train
    from bottega.tasks.plugins import load_plugin
    from bottega.tuning.command import tune

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "augment",
    "compare",
    "crossval",
    "diagnose",
    "doctor",
    "evaluate",
    "load",
    "load_plugin",
    "lr_find",
    "plan",
    "predict",
    "prepare",
    "report",
    "runs",
    "train",
    "tune",
]

_MODULES = {
    "augment": "data.augment_sample",
    "compare": "analysis.library",
    "crossval": "analysis.crossval",
    "diagnose": "analysis.diagnose",
    "doctor": "analysis.library",
    "evaluate": "analysis.evaluate",
    "load": "run.train",
    "load_plugin": "tasks.plugins",
    "lr_find": "analysis.library",
    "plan": "analysis.library",
    "predict": "analysis.predict",
    "prepare": "run.prepare",
    "report": "analysis.report",
    "runs": "analysis.library",
    "train": "run.train",
    "tune": "tuning.command",
}
"""Function -> the module that defines it."""


def __getattr__(name: str) -> Any:
    """Import a function on first use, because importing bottega must not import torch."""
    if name in _MODULES:
        return getattr(import_module(f"bottega.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'bottega' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the library's functions, which are imported on first use, for shells and editors."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
