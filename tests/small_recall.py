"""Small recall runs: within a stream, and across training steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "model.hidden_size": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "data.num_samples": 64,
    "data.num_pairs": 1,
    "data.num_values": 4,
    "data.num_fillers": 4,
    "training.max_steps": 8,
    "training.batch_size": 4,
    "training.scheduler.warmup_steps": 2,
    "training.scheduler.name": "constant",
    "evaluation.every": 4,
    "evaluation.batch_size": None,
    "checkpoint.every": 4,
    "samples.every": None,
    "logging.every": 1,
    "logging.tensorboard": False,
    "logging.report": False,
    "logging.resources": False,
}


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return settings with two segments after the facts, and fewer slots than tokens, so that some are evicted."""
    sizes = {
        "data.segment_length": 4,
        "data.num_questions": 2,
        "data.distance": 2,
        "data.num_keys": 6,
        "model.memory.working_slots": 6,
    }
    return {**SMALL, "output_dir": str(folder), "data.validation.split": 0.2, **sizes, **changes}


def lasting(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return settings with two lasting keys, stated in alternate segments, and a memory that forms a prototype within four steps."""
    sizes = {
        "data.segment_length": 8,
        "data.num_questions": 1,
        "data.distance": 4,
        "data.num_keys": 8,
        "data.num_lasting": 2,
        "model.memory.key_size": 16,
        "model.memory.working_slots": 2,
        "model.memory.episodic_slots": 16,
        "model.memory.semantic_slots": 4,
        "model.memory.promote_after": 3,
    }
    return {**SMALL, "output_dir": str(folder), **sizes, **changes}
