"""Every technique on a GPU, compiled where the engine compiles: it trains, and resumes bitwise equal with `deterministic`."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_matrix import MEDIA, TECHNIQUES

import bottega
import small_multitask
from small_run import differing_tensors, read_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu", "compiled_at_once")]

STEPS = {"training.max_steps": 4, "checkpoint.every": 1, "checkpoint.keep": 9, "evaluation.every": 2, "name": "run"}


def assert_resume_is_bitwise_equal(recipe: str, values: dict[str, Any]) -> None:
    run = bottega.train(recipe, values)
    assert run.step == 4
    assert math.isfinite(run.metrics["loss"])
    end = read_tensors(run.path)
    for step in (3, 4):
        shutil.rmtree(run.path / "checkpoints" / f"step-{step:08d}")
    assert bottega.train(recipe, values).step == 4
    assert differing_tensors(end, read_tensors(run.path)) == []


@pytest.mark.parametrize("medium", MEDIA)
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_trains_and_resumes_bitwise_equal(technique: str, medium: str, tmp_path: Path) -> None:
    values = TECHNIQUES[technique](medium, tmp_path)
    assert_resume_is_bitwise_equal(MEDIA[medium][0], {**values, **STEPS, "device": "cuda", "deterministic": True})


@pytest.mark.parametrize("technique", ["lora", "distill", "ewc and replay"])
def test_fp16_with_loss_scale_matches_fp32(technique: str, tmp_path: Path) -> None:
    """Terms that a technique adds to the loss or the gradients are scaled too. On a GPU dropout masks differ between dtypes."""
    values = {**TECHNIQUES[technique]("classify", tmp_path), **STEPS, "device": "cuda", "model.dropout": 0.0}
    losses = {}
    for precision in ("fp16", "fp32"):
        changes = {"training.mixed_precision": precision, "training.compile": False, "name": precision}
        run = bottega.train("classify", {**values, **changes})
        losses[precision] = [row["loss"] for row in run.history() if row["kind"] == "train"]
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=2e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("balance", ["uncertainty", "pcgrad"])
def test_multitask_with_a_shared_trunk_resumes_bitwise_equal(balance: str, precision: str, tmp_path: Path) -> None:
    values = {**small_multitask.settings(tmp_path), **STEPS, "device": "cuda", "deterministic": True}
    values |= {"training.mixed_precision": precision, "data.weights": balance}
    assert_resume_is_bitwise_equal("multitask", values)
