"""Stability of training: what counts as a spike, skipped steps, and the state over a resume and a rollback."""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

import numpy as np
import pytest

from bottega.callbacks.stability import MIN_LOSSES, WINDOW, Stability, is_spike
from bottega.core.callback import Progress

LOSSES = [float(x) for x in np.random.default_rng(0).normal(3.0, 0.1, 120)]
NORMS = [float(x) for x in np.random.default_rng(1).lognormal(size=120)]


def log_steps(callback: Stability, start: int, stop: int, losses: list[float] = LOSSES) -> list[dict[str, float]]:
    rows = []
    for step in range(start, stop):
        row = {"loss": losses[step], "grad_norm": NORMS[step], "skipped_steps": float(step % 7 == 3)}
        callback.after_step(Progress(step=step + 1), row)
        rows.append(row)
    return rows


def test_spread_is_that_of_the_last_norms() -> None:
    rows = log_steps(Stability(), 0, 120)
    for step in (0, 1, 30, 119):
        window = NORMS[max(0, step + 1 - WINDOW) : step + 1]
        expected = statistics.pstdev(window) / statistics.fmean(window)
        assert rows[step]["grad_norm_spread"] == pytest.approx(expected, rel=1e-12)


def test_spikes_exceed_the_median_by_five_deviations() -> None:
    losses = [*LOSSES]
    window = losses[30:80]
    median = statistics.median(window)
    deviation = statistics.median([abs(loss - median) for loss in window])
    for factor, spikes in ((4.99, 0), (5.01, 1)):
        losses[80] = median + factor * deviation
        callback = Stability()
        before, at = log_steps(callback, 0, 81, losses)[79:]
        assert at["loss_spikes"] - before["loss_spikes"] == spikes


def test_spikes_are_counted_over_the_whole_run() -> None:
    losses = [loss + 5.0 * (step in (5, 40, 90)) for step, loss in enumerate(LOSSES)]
    counts = [row["loss_spikes"] for row in log_steps(Stability(), 0, 120, losses)]
    ordinary = [row["loss_spikes"] for row in log_steps(Stability(), 0, 120)]
    assert counts[MIN_LOSSES - 1] == 0, "the spread of a few losses says nothing"
    assert counts[-1] == ordinary[-1] + 2
    assert counts == sorted(counts)


def test_falling_loss_is_no_spike() -> None:
    losses = [10.0 * math.exp(-step / 20) for step in range(120)]
    assert log_steps(Stability(), 0, 120, losses)[-1]["loss_spikes"] == 0


def test_values_that_are_not_finite_do_not_enter_the_window() -> None:
    callback, undisturbed = Stability(), Stability()
    row = {"loss": math.nan, "grad_norm": math.inf}
    callback.after_step(Progress(step=1), row)
    assert "grad_norm_spread" not in row
    assert row["loss_spikes"] == 0
    log_steps(callback, 0, 60)
    callback.after_step(Progress(step=60), {"loss": math.inf, "grad_norm": math.nan})
    log_steps(undisturbed, 0, 60)
    spikes = [log_steps(c, 60, 120)[-1] for c in (callback, undisturbed)]
    assert spikes[0]["grad_norm_spread"] == spikes[1]["grad_norm_spread"]
    assert callback.state_dict()["losses"] == undisturbed.state_dict()["losses"]


def test_skipped_steps_add_up_with_those_of_a_rollback() -> None:
    callback = Stability()
    progress = Progress(step=3, skip_steps=[1, 7])
    rows: list[dict[str, Any]] = [{"skipped_steps": 2.0}, {"skipped_steps": 0.0}, {}]
    for step, row in zip((3, 6, 9), rows, strict=True):
        progress.step = step
        callback.after_step(progress, row)
    assert [row["skipped_steps"] for row in rows] == [3, 3, 4]


@pytest.mark.parametrize("stop", [1, 9, 49, 50, 77])
def test_a_resumed_run_writes_the_same_numbers(stop: int) -> None:
    uninterrupted = log_steps(Stability(), 0, 120)
    first, second = Stability(), Stability()
    rows = log_steps(first, 0, stop)
    state = json.loads(json.dumps(first.state_dict()))
    log_steps(first, stop, 120)
    second.load_state_dict(state)
    assert rows + log_steps(second, stop, 120) == uninterrupted
    first.load_state_dict(state)  # a rollback
    assert rows + log_steps(first, stop, 120) == uninterrupted
    first.load_state_dict({})  # a rollback to the start
    assert log_steps(first, 0, 120) == uninterrupted


def test_state_is_not_shared_with_the_checkpoint() -> None:
    callback = Stability()
    log_steps(callback, 0, 5)
    state = callback.state_dict()
    before = json.dumps(state)
    log_steps(callback, 5, 10)
    assert json.dumps(state) == before


def test_a_loss_that_is_almost_constant_has_no_spikes() -> None:
    for median in (2.0, -2.0, 0.0, 1e-8):
        earlier = [median] * WINDOW
        assert not is_spike(median, earlier)
        assert not is_spike(median + 4.9e-3 * abs(median), earlier)
        assert is_spike(median + 5.1e-3 * abs(median), earlier) is (median != 0)
