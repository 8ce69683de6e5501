"""A small multitask recipe: a language model and a classifier over one trunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import small_texts
from small_run import write_text

SMALL: dict[str, Any] = {
    "model.hidden_size": 16,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "data.tokenizer.kind": "bytes",
    "training.max_steps": 8,
    "training.batch_size": 4,
    "training.scheduler.warmup_steps": 2,
    "evaluation.every": 4,
    "evaluation.batch_size": 4,
    "checkpoint.every": 4,
    "samples.every": None,
    "logging.every": 1,
    "logging.tensorboard": False,
    "logging.report": False,
    "logging.resources": False,
}


def parts(folder: Path) -> dict[str, Any]:
    """Return `data.parts`: `text`, a language task of 62 windows, and `topics`, a classifier with a longer epoch of 72 texts."""
    folder.mkdir(parents=True, exist_ok=True)
    text = {"data.train.path": str(write_text(folder / "text.txt", words=200)), "data.sequence_length": 16}
    labelled = {
        "data.train.path": str(small_texts.write_texts(folder)),
        "data.validation.split": 0.25,
        "model.word_dropout": 0.0,
        "data.sequence_length": 64,
    }
    return {
        "text": {"recipe": "language", "settings": text, "weight": 0.5, "metric": "perplexity"},
        "topics": {"recipe": "classify/transformer", "settings": labelled, "metric": "accuracy"},
    }


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    part_settings = {f"data.parts.{name}": part for name, part in parts(folder).items()}
    return {**SMALL, "output_dir": str(folder), "data.parts.docstrings": None, **part_settings, **changes}
