"""Runs that are ill on purpose: tiny models, each trained in about a second, and the cycle of illness, advice and cure."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bottega
import small_texts
from bottega.core.errors import Diverged
from bottega.run.train import train_command

QUIET: dict[str, Any] = {
    "logging.tensorboard": False,
    "logging.report": False,
    "logging.resources": False,
    "samples.every": None,
}
ROUTING: dict[str, Any] = {
    **QUIET,
    "model.hidden_size": 32,
    "model.expert_size": 16,
    "data.num_samples": 2000,
    "data.num_inputs": 20,
    "data.validation.num_samples": 500,
    "data.test": None,
    "training.max_steps": 300,
    "training.batch_size": 64,
    "training.learning_rate": 3e-3,
    "training.scheduler.warmup_steps": 10,
    "evaluation.every": 30,
    "evaluation.batch_size": 500,
    "checkpoint.every": 1000,
    "logging.every": 5,
}
"""A healthy run of a tiny mixture of experts, in less than a second."""
SPIKING: dict[str, Any] = {
    **QUIET,
    "model.hidden_size": 32,
    "model.time_steps": 4,
    "training.max_steps": 100,
    "training.batch_size": 32,
    "training.scheduler.warmup_steps": 5,
    "evaluation.every": 20,
    "checkpoint.every": 1000,
    "logging.every": 4,
}
IMAGES: dict[str, Any] = {
    **{key: value for key, value in SPIKING.items() if key != "model.time_steps"},
    "model.hidden_size": 4,
    "evaluation.every": 10,
}
TEXTS: dict[str, Any] = {**QUIET, "training.max_steps": 60, "evaluation.every": 10, "logging.every": 2}
CONSTANT = {"training.scheduler.name": "constant"}


@dataclass(frozen=True)
class Illness:
    """Settings that make a run ill."""

    name: str
    settings: dict[str, Any]
    recipe: str = "routing/large"
    base: dict[str, Any] = field(default_factory=lambda: ROUTING)


ILLNESSES = {
    "overfitting": Illness(
        "overfitting",
        {
            "data.num_samples": 400,
            "model.hidden_size": 64,
            "model.routing_loss_weight": 0.0,
            "evaluation.every": 10,
            "evaluation.metric": "loss",
        },
    ),
    "underfitting": Illness("underfitting", {"training.weight_decay": 30.0}),
    "underfitting-small-model": Illness(
        "underfitting",
        {
            "model.hidden_size": 2,
            "model.expert_size": 2,
            "data.num_samples": 20_000,
            "training.max_steps": 400,
            "training.learning_rate": 0.02,
        },
    ),
    "plateau": Illness(
        "plateau",
        {"data.num_samples": 20_000, "training.learning_rate": 0.05, "training.max_steps": 600, **CONSTANT},
    ),
    "slow-convergence": Illness("slow-convergence", {"training.learning_rate": 1e-4, **CONSTANT}),
    "divergence": Illness("divergence", {"training.learning_rate": 10.0, **CONSTANT}, "classify/transformer", TEXTS),
    "learning-rate-too-high": Illness(
        "learning-rate-too-high", {"training.learning_rate": 1.0, "data.num_samples": 20_000}
    ),
    "learning-rate-too-low": Illness("learning-rate-too-low", {"training.learning_rate": 1e-6}),
    "exploding-gradients": Illness(
        "exploding-gradients",
        {
            "model.routing_loss_weight": 100.0,
            "training.optimizer.name": "sgd",
            "training.learning_rate": 0.03,
            "training.max_grad_norm": None,
        },
    ),
    "vanishing-gradients": Illness("vanishing-gradients", {"model.num_layers": 16}, "classify/spiking", SPIKING),
    "metric-at-chance": Illness(
        "metric-at-chance", {"training.freeze": ["stem", "blocks", "head"]}, "classify/image", IMAGES
    ),
}


def train_and_diagnose(folder: Path, illness: Illness, seed: int, override: str | None = None) -> dict[str, Any]:
    """Train a sick run, or one that follows the advice, and return its diagnosis. A divergence may end the run."""
    base = illness.base
    if illness.recipe == "classify/transformer":
        base = {**small_texts.settings(folder, "cnn"), **base}
    name = f"{illness.name}-{seed}-{'sick' if override is None else 'treated'}"
    settings = {**base, **illness.settings, "output_dir": str(folder), "name": name, "seed": seed}
    words = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]
    words += shlex.split(override) if override is not None else []  # as pasted into the command line
    try:
        train_command([illness.recipe, *words], fresh=False, resume_from=None, allow_data_change=False, quiet=True)
    except Diverged:
        assert override is None, "the treated run diverged"
    return bottega.diagnose(folder / name)


def check_cycle(folder: Path, illness: Illness, seed: int) -> None:
    """Check that the illness is named, and gone in a run with the override of its finding."""
    sick = train_and_diagnose(folder, illness, seed)
    findings = {finding["name"]: finding for finding in sick["findings"]}
    assert illness.name in findings, sick
    treated = train_and_diagnose(folder, illness, seed, findings[illness.name]["override"])
    assert illness.name not in treated["not_checked"], "the treated run is long enough to be judged"
    assert illness.name not in [finding["name"] for finding in treated["findings"]], treated["lines"]
