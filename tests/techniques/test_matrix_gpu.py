"""Every technique on a GPU, compiled where the engine compiles: it trains, and resumes bit for bit with `deterministic`."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_matrix import MEDIA, METHODS

import bottega
import small_parts
from small_run import different, tensors

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

STEPS = {"training.max_steps": 4, "checkpoint.every": 1, "checkpoint.keep": 9, "evaluation.every": 2, "name": "run"}


def resumed_bit_for_bit(recipe: str, values: dict[str, Any]) -> None:
    run = bottega.train(recipe, values)
    assert run.step == 4
    assert math.isfinite(run.metrics["loss"])
    end = tensors(run.path)
    for step in (3, 4):
        shutil.rmtree(run.path / "checkpoints" / f"step-{step:08d}")
    assert bottega.train(recipe, values).step == 4
    assert different(end, tensors(run.path)) == []


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("method", METHODS)
def test_it_trains_and_goes_on_bit_for_bit(method: str, medium: str, tmp_path: Path) -> None:
    values = METHODS[method](medium, tmp_path)
    resumed_bit_for_bit(MEDIA[medium][0], {**values, **STEPS, "device": "cuda", "deterministic": True})


@pytest.mark.parametrize("method", ["lora", "distill", "ewc and replay"])
def test_half_precision_with_a_loss_scale(method: str, tmp_path: Path) -> None:
    """What a technique adds to the loss or to the gradients is scaled as the rest is."""
    values = {**METHODS[method]("classify", tmp_path), **STEPS, "device": "cuda"}
    losses = {}
    for precision in ("fp16", "fp32"):
        own = {"training.mixed_precision": precision, "training.compile": False, "name": precision}
        run = bottega.train("classify", {**values, **own})
        losses[precision] = [row["loss"] for row in run.history() if row["kind"] == "train"]
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=2e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("balance", ["uncertainty", "pcgrad"])
def test_several_tasks_with_one_trunk(balance: str, precision: str, tmp_path: Path) -> None:
    values = {**small_parts.settings(tmp_path), **STEPS, "device": "cuda", "deterministic": True}
    values |= {"training.mixed_precision": precision, "data.weights": balance}
    resumed_bit_for_bit("multitask", values)
