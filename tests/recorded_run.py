"""Run directories with constructed logs, for rules of the diagnosis: what a test does not set is that of a healthy run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bottega.diagnosis.finding import Finding
from bottega.diagnosis.rules import Diagnosis, apply_rules
from bottega.run_files.record import read_record

NUM_LOGS = 40
STEPS_PER_LOG = 10
FALLING = tuple(2.0 * 0.85**index + 0.2 for index in range(NUM_LOGS))
"""A training loss that falls from 2.2 to 0.2."""
RECIPE: dict[str, Any] = {
    "task": "classify",
    "model": {"hidden_size": 32, "num_layers": 8, "dropout": 0.1},
    "data": {"mixture": None, "curriculum": None, "online": None},
    "training": {
        "learning_rate": 1e-3,
        "max_steps": NUM_LOGS * STEPS_PER_LOG,
        "num_epochs": None,
        "max_grad_norm": 1.0,
        "weight_decay": 0.1,
        "optimizer": {"name": "adamw"},
        "scheduler": {"name": "cosine", "warmup_steps": 0},
    },
    "techniques": [],
    "evaluation": {"metric": "loss"},
}


def write_recorded_run(
    folder: Path,
    *,
    losses: Sequence[float | None] = FALLING,
    validation: Mapping[str, Sequence[float]] | None = None,
    final_rate: float = 0.0,
    norms: Sequence[float] | None = None,
    modules: Mapping[str, Mapping[str, float]] | None = None,
    settings: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    planned_steps: int | None = None,
) -> Path:
    """Write a run. `validation` has values of metrics at equal distances; `settings` are dotted keys of the recipe.

    The learning rate falls in a straight line from 1e-3 to `final_rate` of it.
    """
    folder.mkdir(parents=True)
    recipe = json.loads(json.dumps(RECIPE))
    for key, value in (settings or {}).items():
        *parents, last = key.split(".")
        section = recipe
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    steps = [STEPS_PER_LOG * (index + 1) for index in range(len(losses))]
    total = planned_steps or steps[-1]
    (folder / "environment.json").write_text(json.dumps({"steps": total, "device": "cpu"}))
    summary = {"splits": {"train": 1000, "validation": 400}, "classes": {"a": 500, "b": 500}, **(data or {})}
    (folder / "data.json").write_text(json.dumps(summary))
    rates = 1e-3 * np.linspace(1, final_rate, len(losses))
    rows: list[dict[str, Any]] = [
        {"step": step, "kind": "train", "loss": loss, "learning_rate": rate, "grad_norm": norm, "data_wait": 0.0}
        for step, loss, rate, norm in zip(steps, losses, rates, norms or [1.0] * len(losses), strict=True)
    ]
    curves = validation if validation is not None else {"loss": [1.5, 1.0, 0.6, 0.4, 0.3]}
    count = len(next(iter(curves.values()), []))
    for index in range(count):
        step = round((index + 1) * steps[-1] / count)
        rows.append({"step": step, "kind": "eval", **{name: values[index] for name, values in curves.items()}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    statistics = modules if modules is not None else {f"layers.{i}": module() for i in range(2)}
    lines = [{"step": step, "kind": "modules", "samples": step, "modules": statistics} for step in steps]
    (folder / "modules.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def module(*, gradient_norm: float = 1.0, update_ratio: float = 2e-3) -> dict[str, float]:
    """Return the statistics of a module."""
    return {"gradient_norm": gradient_norm, "update_ratio": update_ratio}


def apply_all(run: Path) -> Diagnosis:
    """Return what the rules say of a run."""
    return apply_rules(read_record(run))


def find(run: Path, name: str) -> Finding | None:
    """Return the finding of this name; None if the rule was applied and is silent."""
    diagnosis = apply_all(run)
    assert name not in diagnosis.not_checked, diagnosis.not_checked[name]
    return next((finding for finding in diagnosis.findings if finding.name == name), None)
