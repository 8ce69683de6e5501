"""What plan --memory says is what was there: weights to the byte, activations that grow with the micro-batch alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bottega.analysis.memory import GIB, fit_gpus, format_report, plan_memory
from bottega.core.engine import StepMemory
from bottega.core.errors import UsageError
from bottega.engines.torch.saved_tensors import SavedTensorMeter
from bottega.tasks.recipes import load_recipe
from small_run import settings, write_text


def words(folder: Path, **changes: Any) -> list[str]:
    said = {**settings(folder, write_text(folder / "text.txt")), "training.batch_size": 8, **changes}
    return ["language/shakespeare", *(f"{key}={json.dumps(value)}" for key, value in said.items())]


def test_weights_are_counted_to_the_byte_and_activations_grow_with_the_micro_batch(tmp_path: Path) -> None:
    report = plan_memory(words(tmp_path), quiet=True)
    (model,) = report["weights"]
    assert 4 * model["parameters"] == report["gradient_bytes"]
    assert model["bytes"] - 4 * model["parameters"] == 4 * 2 * 16 * 8, "the turns of 16 places, sine and cosine"
    assert report["optimizer_bytes"] == pytest.approx(2 * report["gradient_bytes"], rel=0.01), "AdamW keeps two means"
    rows = {row["micro_batch"]: row["peak"] for row in report["rows"]}
    assert list(rows) == [1, 2, 4, 8]
    # A line: what does not depend on the examples is small.
    assert rows[8] - rows[4] == pytest.approx(4 * (rows[2] - rows[1]), rel=0.05)
    assert not report["cards"], "no GPU was measured"
    assert "8" in format_report(report)


@pytest.mark.parametrize(("batch", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3])])
def test_no_more_examples_are_tried_than_a_step_has(tmp_path: Path, batch: int, sizes: list[int]) -> None:
    report = plan_memory(words(tmp_path, **{"training.batch_size": batch}), quiet=True)
    assert [row["micro_batch"] for row in report["rows"]] == sizes
    assert report["batch"] == batch


def test_a_check_is_not_forgotten_beside_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    from bottega import cli

    assert cli.main(["plan", "language", "--memory", "--check"]) == 2
    assert "--check and --memory cannot be combined" in capsys.readouterr().err


def test_checkpointing_keeps_less(tmp_path: Path) -> None:
    plain = plan_memory(words(tmp_path, **{"model.num_layers": 4}), quiet=True)
    again = plan_memory(words(tmp_path, **{"model.num_layers": 4, "training.gradient_checkpointing": True}), quiet=True)
    assert again["rows"][-1]["peak"] < 0.7 * plain["rows"][-1]["peak"]


def test_kept_counts_each_storage_once_and_forgets_what_is_gone() -> None:
    kept = SavedTensorMeter([torch.nn.Linear(4, 4)])
    x = torch.ones(1000, requires_grad=True)
    with kept.counting():
        y = (x * x).sum()  # both factors are the same storage
        assert kept.now == 4000
        y.backward()
    del y
    assert (kept.now, kept.peak) == (0, 4000)


def test_a_card_takes_the_largest_micro_batch_that_leaves_room_for_the_context() -> None:
    rows = [
        StepMemory(size, peak=0, reserved=int(gib * GIB), samples_per_second=1.0)
        for size, gib in ((1, 14.0), (2, 22.9), (4, 39.5))
    ]
    found = {card["gib"]: (card["micro_batch"], card["passes"]) for card in fit_gpus(rows, 24)}
    assert found[16] == (1, 24)
    assert found[24] == (2, 12)
    assert found[40] == (2, 12), "39.5 GiB and the context are more than 40"
    assert found[48] == (4, 6)


def test_every_card_is_named_also_where_nothing_fits() -> None:
    (row,) = [StepMemory(1, peak=0, reserved=100 * GIB, samples_per_second=1.0)]
    assert [card["micro_batch"] for card in fit_gpus([row], 8)] == [None] * 5 + [1]


def test_it_is_one_process_that_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="one process"):
        plan_memory(["language"], quiet=True)


def test_the_plan_says_what_could_be_computed_beforehand() -> None:
    from bottega.analysis.plan import precompute_notes

    def said(prefixes: int) -> str:
        folders = {"model.diffusion": "sd", "model.language_model": "lm", "data.train.path": "x.json"}
        recipe = load_recipe(
            [{"task": "personalize", "training.max_steps": 1, "model.num_prefix_tokens": prefixes, **folders}]
        ).recipe
        (line,) = precompute_notes(recipe)
        return line

    assert "none can be precomputed" in said(2)
    assert "no gradient passes through the history" in said(0)
