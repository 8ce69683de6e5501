"""Rows of numbers under three rules, and settings of small routing runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

INPUTS, RULES = 8, 3
SMALL: dict[str, Any] = {
    "model.hidden_size": 16,
    "model.num_layers": 1,
    "model.num_experts": 3,
    "model.expert_size": 8,
    "model.expert_capacity": None,
    "model.spike_threshold": None,
    "model.plasticity": False,
    "model.routing_loss_weight": 0.5,
    "data.workers": 0,
    "data.validation.split": 0.25,
    "training.num_epochs": None,
    "training.max_steps": 8,
    "training.batch_size": 8,
    "training.scheduler.warmup_steps": 2,
    "evaluation.every": 4,
    "evaluation.batch_size": None,
    "checkpoint.every": 4,
    "samples.every": None,
    "logging.every": 1,
    "logging.tensorboard": False,
    "logging.report": False,
    "logging.resources": False,
}
SPIKING: dict[str, Any] = {
    "model.num_layers": 2,
    "model.spike_threshold": 1.0,
    "model.time_steps": 4,
    "model.firing_rate": 0.2,
    "model.router": "spiking",
}


def make_rows(count: int = 96, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Return rows whose first three inputs encode the rule r; the label is whether input 3 + r is positive."""
    draw = np.random.default_rng(seed)
    rule = np.arange(count) % RULES
    x = draw.normal(size=(count, INPUTS))
    x[:, :RULES] = 3 * np.eye(RULES)[rule] + 0.3 * x[:, :RULES]
    label = x[np.arange(count), RULES + rule] > 0
    return {"x": x.astype(np.float32), "label": label.astype(np.int32), "rule": rule.astype(np.int32)}


def write_rows(folder: Path, name: str = "rows.npz", *, without: tuple[str, ...] = (), **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    np.savez(path, **{key: value for key, value in make_rows(**options).items() if key not in without})
    return path


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {**SMALL, "output_dir": str(folder), "data.train.path": str(write_rows(folder)), **changes}


def spiking(folder: Path) -> dict[str, Any]:
    return settings(folder, **SPIKING)


def train(folder: Path, **changes: Any) -> Any:
    """Run `bottega.train` in this process."""
    import bottega

    return bottega.train("routing", settings(folder, **changes))
