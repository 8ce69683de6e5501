"""Warnings about runs that will take hours and about diverged losses; a healthy run has neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bottega
import small_texts
from bottega.callbacks import slow_run
from bottega.callbacks.divergence import describe_divergence
from bottega.callbacks.slow_run import SlowRunWarning, suggest_cheaper_steps
from bottega.core.callback import Progress
from bottega.metrics_log import read_metrics
from bottega.tasks.recipes import load_recipe


@pytest.mark.parametrize(
    "losses",
    [
        [9.0, 590.0, 0.0, 205.0],
        [2.3] * 30 + [40.0] * 30,
        [2.3, 2.0, 1.0, 1e6, 1e7, 1e8],
        [10.0, *np.linspace(10, 2, 60), *[9.5] * 30],
        [1.0] * 5 + [3.0, 30.0, 300.0] * 5,
    ],
)
def test_diverged_loss_is_described(losses: list[float]) -> None:
    assert "the loss diverged: it " in str(describe_divergence(losses))


def test_cross_entropy_above_chance_diverged_before_the_first_log() -> None:
    losses = [1685.0, 11845.0, 68690.0, 0.0]
    assert "rose to 6.869e+04 and ended at 0" in str(describe_divergence(losses, is_cross_entropy=True))
    assert describe_divergence([50.0, 40.0, 39.0]) is None, "a loss other than cross-entropy may start anywhere"


@given(
    seed=st.integers(0, 2**32 - 1),
    start=st.floats(0.01, 12),
    end=st.floats(0, 1),
    count=st.integers(2, 400),
    noise=st.floats(0, 0.3),
    has_spike=st.booleans(),
)
def test_healthy_curve_is_not_diverged(
    seed: int, start: float, end: float, count: int, noise: float, has_spike: bool
) -> None:
    """Falling or flat, with the noise of small batches and a spike in the first half that is recovered from."""
    rng = np.random.default_rng(seed)
    losses = start * (end + (1 - end) * np.exp(-5 * np.arange(count) / count))
    losses *= np.exp(noise * rng.standard_normal(count).clip(-3, 3))
    if has_spike and count > 30:
        losses[int(rng.integers(11, count // 2))] *= 100
    for is_cross_entropy in (False, True):
        assert describe_divergence(losses.tolist(), is_cross_entropy=is_cross_entropy) is None


def test_next_source_of_a_sequence_is_not_a_divergence() -> None:
    losses = [*np.linspace(5, 0.5, 60), *[4.8] * 30]
    assert describe_divergence(losses, is_one_task=False) is None
    assert describe_divergence(losses) is not None


def test_short_negative_and_converged_losses_are_not_diverged() -> None:
    assert describe_divergence([]) is None
    assert describe_divergence([3.0]) is None
    assert describe_divergence([0.0, 0.0, 2.7]) is None, "the loss started at zero"
    assert describe_divergence([-5.0, -20.0, -40.0]) is None
    assert describe_divergence([0.002, 0.005, 0.02]) is None, "noise of a converged model"


@pytest.mark.parametrize(("rate", "diverges"), [(1e-3, False), (10.0, True)])
def test_divergence_is_logged_at_the_end_of_a_run(tmp_path: Path, rate: float, diverges: bool) -> None:
    changes: dict[str, Any] = {"training.learning_rate": rate, "training.max_steps": 24, "name": "run"}
    run = bottega.train("classify", small_texts.settings(tmp_path, "cnn", **changes))
    losses = [row["loss"] for row in read_metrics(run.path / "metrics.jsonl") if row["kind"] == "train"]
    assert (max(losses) > 100) == diverges, "precondition of the test"
    lines = [line for line in (run.path / "log.txt").read_text().splitlines() if "the loss diverged" in line]
    assert len(lines) == diverges
    if diverges:
        assert "lower training.learning_rate (10.0)" in lines[0]


def collect_slow_run_warnings(steps: list[int], seconds: float, *, total: int = 1000, start_step: int = 0) -> list[str]:
    """Return the warnings of a run that logs at `steps`, each step taking `seconds`."""
    recipe, warned = load_recipe(["image", {"data.image_size": 32}]).recipe, []
    callback, progress = SlowRunWarning(recipe, warned.append), Progress(step=start_step, total=total)
    callback.start(progress)
    for step in steps:
        progress.step = step
        callback.after_step(progress, {"step_seconds": seconds})
    return warned


def test_hours_are_estimated_once_after_the_first_steps() -> None:
    (line,) = collect_slow_run_warnings([1, 2, 3, 4, 5], 13.0)
    assert "997 more steps of 13 s take about 3.6 hours on this CPU" in line
    assert "a larger model.patch_size (2), or a smaller model.hidden_size (128)" in line
    assert "data.image_size (32) or training.batch_size (128); Ctrl-C" in line
    assert collect_slow_run_warnings([1, 2], 13.0) == []
    assert collect_slow_run_warnings([10, 20], 3.0) == [], "49 minutes are below the limit"
    assert collect_slow_run_warnings([901, 902, 903], 13.0, start_step=900) == [], (
        "only the remaining steps of a resumed run count"
    )
    assert "days" in collect_slow_run_warnings([10], 1000.0)[0]


@pytest.mark.parametrize(
    "name", ["language", "classify", "image", "audio", "video", "image_vae/digits", "routing", "recall"]
)
def test_every_task_has_keys_that_make_a_step_cheaper(name: str) -> None:
    recipe = load_recipe([name, {"data.train.path": "x"} if name == "classify" else {}]).recipe
    text = suggest_cheaper_steps(recipe)
    assert "training.batch_size (" in text
    assert "None" not in text


def test_a_unet_has_no_patches() -> None:
    assert "patch_size" not in suggest_cheaper_steps(load_recipe(["image", {"model.backbone": "unet"}]).recipe)


def test_slow_training_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_run, "LONG_RUN_SECONDS", 0.0)
    run = bottega.train("classify", small_texts.settings(tmp_path, "cnn", name="run"))
    assert (run.path / "log.txt").read_text().count("on this CPU; a step is cheaper with") == 1
