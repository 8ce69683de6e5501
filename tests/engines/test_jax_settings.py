"""Settings of training with `engine: jax`: what is trained, at which rate, from which samples, as in torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bottega
import small_run
import small_texts
from both_engines import Subject, assert_same_metrics, build_both, find_largest_difference
from small_run import differing_tensors

TWO_LAYERS = {
    "model.num_layers": 2,
    "training.weight_decay": 0.5,
    "training.learning_rate": 0.01,
    "training.optimizer.eps": 1e-5,
}
"""With the default epsilon, the first update of a weight whose gradient is about 1e-9 is as large as any, and its sign is rounding."""


def language(folder: Path, **changes: Any) -> dict[str, Any]:
    return {**small_run.settings(folder, small_run.write_text(folder / "text.txt")), **TWO_LAYERS, **changes}


def write_lines(folder: Path) -> Path:
    """Write texts of different lengths, one a line."""
    path = folder / "lines.jsonl"
    rows = [{"text": "alpha beta gamma " * (1 + n % 5), "score": n} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def find_changed_parameters(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> set[str]:
    names = differing_tensors(before, after)
    return {name.removeprefix("model.safetensors/") for name in names if name.startswith("model.safetensors/")}


def train_both(settings: dict[str, Any], recipe: str = "language/shakespeare") -> tuple[Subject, list[set[str]]]:
    """Train five steps with both engines, compare them, and return the parameters that each step has changed in JAX."""
    torch_side, jax_side = build_both(recipe, settings)
    changed, reports, state = [], [], jax_side.state()
    for step in range(5):
        reports += jax_side.advance(step, step + 1)
        changed.append(find_changed_parameters(state, state := jax_side.state()))
    assert_same_metrics(reports, torch_side.advance(0, 5))
    assert find_largest_difference(torch_side.state(), state) < 1e-5
    return jax_side, changed


def test_layer_decay_and_groups_scale_the_rate_and_freeze(tmp_path: Path) -> None:
    groups = [
        {"pattern": r".*\.mlp\.up_proj\..*", "scale": 0.1, "weight_decay": 0.0},
        {"pattern": r"model\.norm\.weight", "starts": "3 steps"},
        {"pattern": ".*"},
    ]
    settings = {
        "training.layer_decay": 0.5,
        "training.groups": groups,
        "training.freeze": ["model.embed_tokens"],
        "training.ema": 0.9,
        "training.micro_batch_size": 2,
    }
    subject, changed = train_both(language(tmp_path, **settings))
    names = set(subject.engine.parameters())
    assert changed[1] == names - {"model.embed_tokens.weight", "model.norm.weight"}
    assert changed[4] == names - {"model.embed_tokens.weight"}
    assert subject.engine.assigned["model.layers.0.mlp.gate_proj.weight"].scale < 0.5
    assert subject.engine.assigned["model.layers.1.mlp.up_proj.weight"].weight_decay == 0.0


def test_layers_are_unfrozen_from_the_last_one_down(tmp_path: Path) -> None:
    _, changed = train_both(language(tmp_path, **{"training.unfreeze": {"layers_per": "2 steps"}}))
    sizes = [len(names) for names in changed]
    assert sizes[0] == sizes[1] < sizes[2] == sizes[3] < sizes[4]
    assert not any("layers.0" in name for name in changed[3])


def test_stages_of_a_curriculum_have_their_own_batch_size_and_rate(tmp_path: Path) -> None:
    stages = [
        {"share": 0.4, "steps": 2, "batch_size": 2, "learning_rate": 0.003},
        {"share": 0.7, "steps": 2, "replay": 0.5},
        {"share": 1.0, "steps": 4, "batch_size": 6},
    ]
    curriculum = {"data.curriculum": {"by": "length", "stages": stages}, "data.padding": True}
    settings = {**language(tmp_path), **curriculum, "data.train.path": str(write_lines(tmp_path))}
    subject, _ = train_both({**settings, "training.learning_rate": 0.001})
    assert [len(subject.loader.batch(step)["input_ids"]) for step in range(5)] == [2, 2, 4, 4, 6]


def test_a_mixture_with_label_smoothing_and_class_weights(tmp_path: Path) -> None:
    settings = small_texts.settings(tmp_path, **{"data.split": None})
    path = settings.pop("data.train.path")
    settings = {key: value for key, value in settings.items() if not key.startswith("data.train")}
    sources = [{"path": path, "labels": labels} for labels in (["cook", "sail"], ["sing"])]
    mixture = {"data.sources": [{**sources[0], "weight": 3.0}, sources[1]]}
    loss = {"training.label_smoothing": 0.2, "loss.class_weights": [3.0, 1.0, 0.5]}
    train_both({**settings, **mixture, **loss}, "classify")


def test_plateau_and_early_stopping_read_the_evaluations(tmp_path: Path) -> None:
    """The rate is lowered after evaluations that do not improve, and the run ends early."""
    settings = {
        "training.scheduler.name": "plateau",
        "training.scheduler.patience": 0,
        "training.early_stopping": {"patience": 2, "threshold": 10.0},
        "training.max_steps": 20,
        "evaluation.every": 1,
        "checkpoint.every": None,
    }
    rows = {}
    for engine in ("torch", "jax"):
        run = bottega.train("language/shakespeare", language(tmp_path, name=engine, engine=engine, **settings))
        lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
        rows[engine] = [(row["step"], row["learning_rate"], row["loss"]) for row in lines if row["kind"] == "train"]
    assert 2 <= len(rows["jax"]) < 20
    assert [row[:2] for row in rows["jax"]] == [row[:2] for row in rows["torch"]]
    assert [row[2] for row in rows["jax"]] == pytest.approx([row[2] for row in rows["torch"]], rel=1e-4)
    assert len({rate for _, rate, _ in rows["jax"]}) > 1, "the rate was lowered"
