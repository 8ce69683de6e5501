"""`plan --memory`: weights to the byte, activations that grow with the micro-batch only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bottega.analysis.memory import GIB, fit_gpus, format_report, plan_memory
from bottega.core.errors import UsageError
from bottega.engines.torch.saved_tensors import SavedTensorMeter
from bottega.measurements import StepMemory
from bottega.tasks.recipes import load_recipe
from small_run import settings, write_text


def plan_arguments(folder: Path, **changes: Any) -> list[str]:
    values = {**settings(folder, write_text(folder / "text.txt")), "training.batch_size": 8, **changes}
    return ["language/shakespeare", *(f"{key}={json.dumps(value)}" for key, value in values.items())]


def test_weights_are_counted_to_the_byte_and_activations_grow_with_the_micro_batch(tmp_path: Path) -> None:
    report = plan_memory(plan_arguments(tmp_path), quiet=True)
    (model,) = report["weights"]
    assert 4 * model["parameters"] == report["gradient_bytes"]
    assert model["bytes"] - 4 * model["parameters"] == 4 * 2 * 16 * 8, "sine and cosine of 16 rotary positions"
    assert report["optimizer_bytes"] == pytest.approx(2 * report["gradient_bytes"], rel=0.01), "AdamW keeps two means"
    rows = {row["micro_batch"]: row["peak"] for row in report["rows"]}
    assert list(rows) == [1, 2, 4, 8]
    # Linear in the micro-batch: the constant part is small.
    assert rows[8] - rows[4] == pytest.approx(4 * (rows[2] - rows[1]), rel=0.05)
    assert not report["cards"], "no GPU was measured"
    assert "8" in format_report(report)


@pytest.mark.parametrize(("batch", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3])])
def test_micro_batches_do_not_exceed_the_batch(tmp_path: Path, batch: int, sizes: list[int]) -> None:
    report = plan_memory(plan_arguments(tmp_path, **{"training.batch_size": batch}), quiet=True)
    assert [row["micro_batch"] for row in report["rows"]] == sizes
    assert report["batch"] == batch


def test_check_and_memory_cannot_be_combined(capsys: pytest.CaptureFixture[str]) -> None:
    from bottega import cli

    assert cli.main(["plan", "language", "--memory", "--check"]) == 2
    assert "--check and --memory cannot be combined" in capsys.readouterr().err


def test_gradient_checkpointing_lowers_the_peak(tmp_path: Path) -> None:
    plain = plan_memory(plan_arguments(tmp_path, **{"model.num_layers": 4}), quiet=True)
    again = plan_memory(
        plan_arguments(tmp_path, **{"model.num_layers": 4, "training.gradient_checkpointing": True}), quiet=True
    )
    assert again["rows"][-1]["peak"] < 0.7 * plain["rows"][-1]["peak"]


def test_saved_tensors_count_each_storage_once_until_freed() -> None:
    meter = SavedTensorMeter([torch.nn.Linear(4, 4)])
    x = torch.ones(1000, requires_grad=True)
    with meter.counting():
        y = (x * x).sum()  # both factors are the same storage
        assert meter.current_bytes == 4000
        y.backward()
    del y
    assert (meter.current_bytes, meter.peak_bytes) == (0, 4000)


def test_gpu_fits_the_largest_micro_batch_beside_the_context() -> None:
    rows = [
        StepMemory(size, peak=0, reserved=int(gib * GIB), samples_per_second=1.0)
        for size, gib in ((1, 14.0), (2, 22.9), (4, 39.5))
    ]
    fits = {card["gib"]: (card["micro_batch"], card["passes"]) for card in fit_gpus(rows, 24)}
    assert fits[16] == (1, 24)
    assert fits[24] == (2, 12)
    assert fits[40] == (2, 12), "39.5 GiB and the context are more than 40"
    assert fits[48] == (4, 6)


def test_every_gpu_is_listed_even_if_nothing_fits() -> None:
    (row,) = [StepMemory(1, peak=0, reserved=100 * GIB, samples_per_second=1.0)]
    assert [card["micro_batch"] for card in fit_gpus([row], 8)] == [None] * 5 + [1]


def test_memory_is_measured_by_one_process_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="one process"):
        plan_memory(["language"], quiet=True)


def test_plan_lists_what_can_be_precomputed() -> None:
    from bottega.analysis.plan import list_precompute_notes

    def note_of(prefixes: int) -> str:
        folders = {"model.diffusion": "sd", "model.language_model": "lm", "data.train.path": "x.json"}
        recipe = load_recipe(
            [{"task": "personalize", "training.max_steps": 1, "model.num_prefix_tokens": prefixes, **folders}]
        ).recipe
        (line,) = list_precompute_notes(recipe)
        return line

    assert "none can be precomputed" in note_of(2)
    assert "no gradient passes through the history" in note_of(0)
