"""Sequences of sources with `engine: jax`: EWC, replay and metrics per source agree with torch, and runs resume bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bottega
import small_run
import small_texts
from both_engines import Subject, assert_same_metrics, build_both, find_largest_difference
from bottega.core.errors import UsageError
from bottega.metrics_log import read_metrics
from bottega.run.compose import build_training_plan
from bottega.tasks import registry
from bottega.tasks.recipes import load_recipe
from small_run import differing_tensors

EWC_AND_REPLAY = [
    {"name": "ewc", "options": {"samples": 4, "strength": 1e4}},
    {"name": "replay", "options": {"share": 0.25, "memory": 5}},
]


def language(folder: Path) -> dict[str, Any]:
    """A language run over two sources in turn."""
    paths = [small_run.write_text(folder / f"{i}.txt", seed=i, words=words) for i, words in enumerate((600, 400))]
    settings = {key: value for key, value in small_run.settings(folder, paths[0]).items() if key != "data.train.path"}
    sources = {"data.sources": [{"path": str(path)} for path in paths], "data.mixture": "sequence"}
    return {**settings, **sources, "data.validation.split": 0.2, "techniques": EWC_AND_REPLAY}


def classify(folder: Path) -> dict[str, Any]:
    """A text classifier that learns two classes first and the third later."""
    settings = small_texts.settings(folder, "cnn", **{"model.word_dropout": 0.0, "data.split": None})
    path = settings["data.train.path"]
    sources = [
        {"path": path, "labels": ["cook", "sail"], "name": "early"},
        {"path": path, "labels": ["sing"], "name": "late"},
    ]
    remaining = {key: value for key, value in settings.items() if not key.startswith("data.train")}
    return {**remaining, "data.train": {}, "data.sources": sources, "data.mixture": "sequence"}


def find_boundary(subject: Subject) -> int:
    """Return the first step of the second source."""
    order: Any = subject.loader.order
    return int(order.schedule.first_steps(subject.loader.batch_size)[1])


def test_ewc_across_a_boundary_equals_torch_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    torch_side, jax_side = build_both("language/shakespeare", language(tmp_path))
    boundary = find_boundary(jax_side)
    assert 1 < boundary < 6
    reports = torch_side.advance(0, 8)
    folders, early = {}, []
    for step in range(8):
        if step in (boundary - 1, boundary):  # at the boundary itself the importance is measured again
            folders[step] = jax_side.save(tmp_path / "checkpoints", step)
        early += jax_side.advance(step, step + 1)
    assert_same_metrics(early, reports)
    penalties = [report["penalty"] for report in early]
    assert not any(penalties[: boundary + 1])
    assert min(penalties[boundary + 1 :]) > 1e-3, "the penalty is large enough to compare"
    end = jax_side.state()
    assert find_largest_difference(torch_side.state(), end) < 1e-5
    fisher = {name: value for name, value in end.items() if "/fisher/" in name}
    assert len(fisher) == len(jax_side.engine.parameters())
    assert all(value.max() > 0 for value in fisher.values())

    metrics = jax_side.evaluate()
    assert {"source-0/loss", "source-1/loss"} <= metrics.keys()
    assert metrics == pytest.approx(torch_side.evaluate(), rel=1e-4)

    resumed = Subject("language/shakespeare", {"model.dropout": 0.0, **language(tmp_path)}, engine="jax")
    for step, folder in folders.items():
        resumed.engine.load(folder)
        resumed.advance(step, 8)
        assert differing_tensors(end, resumed.state()) == [], f"resumed at step {step}"


def test_metrics_of_each_source_equal_torch(tmp_path: Path) -> None:
    """With class weights, by which the loss is counted, and rows that stay in order."""
    torch_side, jax_side = build_both("classify", {**classify(tmp_path), "loss.class_weights": [5.0, 1.0, 0.2]})
    expected, actual = torch_side.evaluate(), jax_side.evaluate()
    assert {"early/accuracy", "late/loss"} <= actual.keys()
    assert actual == pytest.approx(expected, rel=1e-5)


# Runs

TRAIN = """
import json, sys, bottega
print(sorted(bottega.train("language/shakespeare", json.loads(sys.argv[1])).metrics))
print(sorted({"torch", "transformers"} & {*sys.modules}))
"""


def test_a_run_with_ewc_and_distill_never_imports_torch(tmp_path: Path) -> None:
    """A sequence with EWC and replay, metrics per source, a matrix of forgetting, and a teacher that torch has trained."""
    sequence = {**language(tmp_path), "training.max_steps": 4}
    teacher = bottega.train("language/shakespeare", {**sequence, "name": "teacher"}).path
    distill = {"name": "distill", "options": {"teacher": str(teacher)}}
    student = {**sequence, "engine": "jax", "name": "student", "techniques": [*EWC_AND_REPLAY, distill]}
    environment = small_run.environment(XLA_FLAGS="--xla_backend_optimization_level=0")  # compiled faster
    code = [sys.executable, "-c", TRAIN, json.dumps(student)]
    done = subprocess.run(code, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    metrics, modules = [line for line in done.stdout.splitlines() if line.startswith("[")]
    for name in ("source-0/distill", "source-1/loss", "forgetting"):
        assert repr(name) in metrics
    assert modules == "[]"
    matrix = json.loads((tmp_path / "student" / "forgetting.json").read_text())
    assert np.isfinite(matrix["matrix"]).all()


REFUSED = {
    "techniques=[lora]": "techniques: engine: jax has no lora; it has distill, ewc, replay; use engine=torch",
    "techniques=[adapter]": "techniques: engine: jax has no adapter; it has distill, ewc, replay; use engine=torch",
    "techniques=[maml]": "techniques: engine: jax has no maml; it has distill, ewc, replay; use engine=torch",
    "techniques=[plasticity]": "techniques: engine: jax has no plasticity; it has distill, ewc, replay; use engine=torch",
    "techniques=[{name: distill, options: {teacher: FOLDER, hidden: 0.5}}]": (
        "techniques.distill.hidden: engine: jax has no 0.5; it has 0.0; use engine=torch"
    ),
}


@pytest.mark.parametrize(("setting", "message"), REFUSED.items())
def test_techniques_without_a_jax_form_are_refused_in_one_line(setting: str, message: str, tmp_path: Path) -> None:
    text = small_run.write_text(tmp_path / "text.txt")
    setting = setting.replace("FOLDER", str(tmp_path))
    done = small_run.run_bottega(small_run.train_arguments(tmp_path, text, "engine=jax", setting))
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().splitlines() == [f"bottega: {message}"]
    assert not (tmp_path / "run").exists()


def test_ewc_of_several_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(["language/shakespeare", {**language(tmp_path), "engine": "jax"}]).recipe
    workload = registry.open_workload(recipe, progress=lambda stage, done, total: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="techniques: ewc with engine: jax needs a single process"):
        build_training_plan(recipe, workload)


def test_a_stream_is_evaluated_before_it_is_trained_on_as_in_torch(tmp_path: Path) -> None:
    settings = small_run.settings(tmp_path, small_run.write_text(tmp_path / "text.txt", words=300))
    stream = {"data.online": {"replay": 0.25}, "training.max_steps": 6, "model.dropout": 0.0, "logging.every": 2}
    rows = {}
    for engine in ("torch", "jax"):
        run = bottega.train("language/shakespeare", {**settings, **stream, "engine": engine, "name": engine})
        rows[engine] = [row for row in read_metrics(run.path / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in rows["jax"]] == [2, 4, 6]
    for name in ("loss", "online/loss"):
        assert [row[name] for row in rows["jax"]] == pytest.approx([row[name] for row in rows["torch"]], rel=1e-5)
