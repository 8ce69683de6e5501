"""The recipe routing/mind: routing, language and recall over one state-space trunk with a spiking router, also online."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bottega
import small_routing_mind
from bottega.core.errors import UsageError
from bottega.data.recall import IGNORE_INDEX
from bottega.tasks.recipes import load_recipe
from small_run import differing_tensors, read_tensors

METRICS = ("routing/accuracy", "language/perplexity", "memory/retrieval_accuracy")


def train(folder: Path, **changes: Any) -> Path:
    return bottega.train("routing/mind", small_routing_mind.settings(folder, **changes)).path


def test_the_parts_share_their_trunk_and_have_their_own_metrics(tmp_path: Path) -> None:
    path = train(tmp_path)
    model = bottega.load(path, device="cpu").model
    mixers = [model.part(name).model.layers[0].mixer for name in ("routing", "language", "memory")]
    for layer in ("in_proj", "conv1d", "dynamics", "norm", "out_proj"):
        assert len({id(getattr(mixer, layer)) for mixer in mixers}) == 1, layer
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if row["kind"] == "eval"]
    assert evaluations
    assert all(name in row for row in evaluations for name in METRICS)
    _assert_generate_names_the_parts(path)


def _assert_generate_names_the_parts(path: Path) -> None:
    saved = bottega.load(path, device="cpu")
    with pytest.raises(UsageError, match=r"part memory: this part does not generate; choose part language$"):
        saved.generate(part="memory")
    with pytest.raises(
        UsageError, match=r"part foo: this run has no such part; its parts are routing, language, memory$"
    ):
        saved.generate(part="foo")


def test_the_console_shows_the_headline_metric_of_each_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bottega.train("routing/mind", small_routing_mind.settings(tmp_path), quiet=False)
    lines = [line for line in capsys.readouterr().err.splitlines() if "validation" in line]
    assert lines
    for line in lines:
        assert all(name in line for name in METRICS)
        assert "load/0" not in line, "only in the files"


@pytest.mark.parametrize("weights", ["fixed", "dynamic"])
def test_dynamic_weights_are_learned_and_fixed_ones_are_not(tmp_path: Path, weights: str) -> None:
    last = read_tensors(train(tmp_path, **{"data.weights": weights}))
    learned = [name for name in last if "log_variance" in name and name.startswith("model.safetensors")]
    assert len(learned) == (3 if weights == "dynamic" else 0)


ONLINE = {"data.online": {"replay": 0.25, "memory": 12}, "training.max_steps": 6, "training.scheduler.name": "constant"}


def test_online_resume_is_bitwise_equal(tmp_path: Path) -> None:
    """The checkpoint holds plasticity, expert load, memory and optimizer moments."""
    uninterrupted = train(tmp_path / "whole", name="run", **ONLINE)
    for steps in (3, 6):
        resumed = train(tmp_path / "halves", name="run", **{**ONLINE, "training.max_steps": steps})
    assert differing_tensors(read_tensors(uninterrupted), read_tensors(resumed)) == []
    rows = [json.loads(line) for line in (resumed / "metrics.jsonl").read_text().splitlines()]
    assert all(f"online/{name}" in rows[-1] for name in METRICS)


def test_online_metrics_continue_past_the_first_epoch(tmp_path: Path) -> None:
    """An epoch has eight segments here, and later epochs generate new ones."""
    settings = small_routing_mind.settings(tmp_path, **ONLINE)
    settings["data.parts.memory"]["settings"]["data.num_samples"] = 8
    path = bottega.train("routing/mind", settings).path
    counted = json.loads((path / "checkpoints" / "last" / "progress.json").read_text())["notes"]["prequential"]
    source = bottega.load(path, device="cpu").workload.parts["memory"].data.training()
    batch = load_recipe([path / "recipe.yaml"]).recipe.training.batch_size
    indices = np.arange(6 * batch)
    answers = source.rows(indices % 8, indices // 8)["answers"]
    assert len(source) == 8 < len(indices)
    assert counted["memory/retrieval_accuracy"][1] == (answers != IGNORE_INDEX).sum() > 8


def test_plasticity_changes_the_router_weights(tmp_path: Path) -> None:
    timed = read_tensors(train(tmp_path / "timed", **ONLINE))
    off = {"techniques": [{"name": "plasticity", "options": {"rate": 0.0}}]}
    plain = read_tensors(train(tmp_path / "plain", **ONLINE, **off))
    synapses = [name for name in timed if name.endswith("synapse.weight") and name.startswith("model.safetensors")]
    assert len(synapses) >= 2
    assert any(not np.array_equal(timed[name], plain[name]) for name in synapses)


def test_the_memory_is_in_the_checkpoint(tmp_path: Path) -> None:
    last = read_tensors(train(tmp_path))
    memory = {
        name: value for name, value in last.items() if ".memory." in name and name.startswith("model.safetensors")
    }
    assert memory
    assert any(value.any() for value in memory.values())
