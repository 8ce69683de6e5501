"""What a run writes about itself: statistics of its modules, its size and its compute, and the keys that choose them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega.metrics_log import read_metrics
from bottega.run.compose import build_engine, build_loader, build_training_plan, resolve_cadences
from bottega.tasks import registry
from bottega.tasks.recipes import load_recipe
from small_run import settings, train, write_text


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def test_a_resumed_run_has_each_inspected_step_once(tmp_path: Path, text: Path) -> None:
    changes: dict[str, Any] = {"name": "run", "training.scheduler.name": "constant"}
    run = train(tmp_path, text, **changes, **{"training.max_steps": 4})
    path = run.path / "modules.jsonl"
    (first, *_) = read_metrics(path)
    assert (first["step"], first["kind"], first["samples"]) == (1, "modules", 4)
    assert {"embed_tokens", "layers.0"} <= set(first["modules"])
    assert set(first["modules"]["layers.0"]) == {"gradient_norm", "update_ratio", "dead_fraction"}
    lost = {**first, "step": 5, "samples": 20, "lost": True}
    path.write_text(path.read_text() + json.dumps(lost) + "\n" + '{"step": 6, "ki')  # of a killed process
    train(tmp_path, text, **changes, **{"training.max_steps": 8})
    rows = read_metrics(path)
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps))
    assert 5 in steps
    assert not any("lost" in row for row in rows)


def test_modules_can_be_turned_off_without_renaming_the_run(tmp_path: Path, text: Path) -> None:
    names = set()
    for number, changes in enumerate(({}, {"logging.modules": False}, {"logging.histograms": 2})):
        recipe = load_recipe(["language/shakespeare", settings(tmp_path, text, **changes)]).recipe
        names.add(recipe.run_name())
        run = train(tmp_path, text, name=f"run-{number}", **changes, **{"training.max_steps": 1})
        assert (run.path / "modules.jsonl").exists() is recipe.logging.modules
    assert len(names) == 1


@pytest.mark.parametrize(
    ("changes", "module_statistics", "histograms"),
    [
        ({"logging.every": 3}, 3, 0),
        ({"logging.every": None}, 40, 0),
        ({"logging.modules": False, "logging.histograms": 500}, 0, 500),
        ({"logging.histograms": "10%", "logging.every": 5}, 5, 4),
        ({"logging.histograms": 0, "logging.every": 5}, 5, 0),
    ],
)
def test_cadences_of_the_keys(
    tmp_path: Path, text: Path, changes: dict[str, Any], module_statistics: int, histograms: int
) -> None:
    recipe = load_recipe(["language/shakespeare", settings(tmp_path, text, **changes)]).recipe
    workload = registry.open_workload(recipe, progress=lambda stage, done, total: None)
    plan = build_training_plan(recipe, workload)
    loader = build_loader(recipe, plan.training, build_engine(recipe, plan.task), plan.order)
    cadences = resolve_cadences(recipe, 40, loader, has_validation=False)
    assert (cadences.module_statistics, cadences.histograms) == (module_statistics, histograms)


def test_environment_has_the_size_and_the_compute_of_the_run(tmp_path: Path, text: Path) -> None:
    lora = {"name": "lora", "options": {"rank": 2}}
    watched = train(tmp_path, text, name="watched", **{"logging.resources": True, "training.max_steps": 2})
    adapted = train(tmp_path, text, name="adapted", techniques=[lora], **{"training.max_steps": 2})
    metadata, of_adapted = (json.loads((run.path / "environment.json").read_text()) for run in (watched, adapted))
    assert metadata["parameters"] == metadata["trainable_parameters"] == metadata["active_parameters"]
    assert of_adapted["trainable_parameters"] < of_adapted["parameters"]
    assert "flops_per_sample" not in of_adapted, "logging.resources is off"
    for row in watched.history():
        if row["kind"] == "train":
            expected = row["samples_per_second"] * metadata["flops_per_sample"] / metadata["matmul_rate"]
            assert row["matmul_share"] == pytest.approx(expected)
            assert {"loss_spikes", "skipped_steps", "grad_norm_spread"} <= set(row)


def test_weights_are_equal_whatever_is_logged(tmp_path: Path, text: Path) -> None:
    from safetensors.numpy import load_file

    quiet = {"logging.modules": False, "logging.resources": False}
    loud = {"logging.modules": True, "logging.resources": True, "logging.histograms": 1}
    weights = []
    for name, changes in (("quiet", quiet), ("loud", loud)):
        run = train(tmp_path, text, name=name, **changes, **{"model.dropout": 0.2})
        weights.append(load_file(run.path / "checkpoints" / "last" / "model.safetensors"))
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])
