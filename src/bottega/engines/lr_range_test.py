"""A learning-rate range test (Smith, 2017): the rate rises step by step until the loss diverges; where it fell is the answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bottega.core.engine import Engine
from bottega.core.errors import UsageError

MIN_STEPS, NUM_STEPS, LOWEST_RATE, HIGHEST_RATE = 10, 100, 1e-7, 10.0
"""Steps below which no slope can be told from noise; and the test as it is unless said."""
KEEP = 0.7
"""Of the running mean that tells when to stop; it looks back some three steps."""
HALF = 0.5
"""Decades of rates to either side that a line is fitted to."""
SAFE = 0.5
"""Of the steepest rate, to err on the side that is only slow. One seed each: the convolutional classifier of the embedded
docstrings ended (300 steps) at 1.47 with the steepest rate and 0.94 with about half, the best of five being 0.84; a small
language model (200 steps) at 4.34 with the steepest, 4.85 with half and 3.93 with twice as much, so there half is too little."""
NOISE = 3.5
"""A fall by fewer standard errors than this is none: the lowest of some fifteen means that only jitter lies two below."""


class Stream(Protocol):
    def __call__(self, step: int) -> Any: ...


@dataclass(frozen=True)
class RateSweep:
    """`losses[i]` and `losses[i + 1]` were measured before and after the update with `rates[i]`."""

    rates: np.ndarray
    losses: np.ndarray
    diverged: bool

    @property
    def losses_after_update(self) -> np.ndarray:
        return self.losses[1:]


@dataclass(frozen=True)
class RangeTestResult:
    """Where the loss fell, and where it was lowest."""

    steepest: float
    minimum: float
    start_loss: float
    lowest_loss: float
    smoothed: np.ndarray
    is_still_falling: bool
    """It was still falling at the highest rate."""
    diverges_at: float | None
    """Where it is above its start again, which is long before the test can be sure of it and ends."""

    @property
    def suggestion(self) -> float:
        """In three digits, so that what is printed is what is used."""
        return float(f"{SAFE * self.steepest:.2e}")


def check_range(low: float, high: float, steps: int) -> None:
    if not 0 < low < high < math.inf:
        raise UsageError(f"--min {low:g} --max {high:g}: expected rates above 0, the first below the second")
    if steps < MIN_STEPS:
        raise UsageError(f"--steps {steps}: a slope needs at least {MIN_STEPS}")


def sweep_learning_rates(
    engine: Engine,
    batches: Stream,
    *,
    low: float = LOWEST_RATE,
    high: float = HIGHEST_RATE,
    steps: int = NUM_STEPS,
    first: int = 0,
    report_progress: Callable[[int, int], None] = lambda done, total: None,
) -> RateSweep:
    """Train with rates from `low` to `high`, each a fixed factor above the last. What fetch tells is the same on all
    ranks, so that all of them stop at the same step."""
    check_range(low, high, steps)
    rates = np.geomspace(low, high, steps)
    engine.rate = lambda step: float(rates[min(step - first, steps - 1)])
    losses: list[float] = []
    mean, best, diverged = 0.0, math.inf, False
    with closing(batches(first)) as stream:
        for number, batch in zip(range(steps + 1), stream, strict=False):
            report = engine.fetch(engine.train_step(first + number, batch))
            loss = report["loss"]
            diverged = bool(report.get("bad_steps", 0)) or not math.isfinite(loss)
            if diverged:
                break
            losses.append(loss)
            mean = loss if number == 0 else KEEP * mean + (1 - KEEP) * loss
            best = min(best, mean)
            report_progress(number, steps)
            diverged = mean > _limit(losses, best)
            if diverged:
                break
    return RateSweep(rates[: max(0, len(losses) - 1)], np.array(losses), diverged)


def _limit(losses: list[float], best: float) -> float:
    """As far above the start as the loss has been below it, and at least half as high again."""
    start = float(np.mean(losses[:3]))
    return start + max(start - best, 0.5 * abs(start))


def analyse_sweep(swept: RateSweep, *, low: float, high: float, steps: int) -> RangeTestResult:
    """The rate at which the loss falls fastest over the logarithm of the rate, before it is lowest."""
    if len(swept.rates) < MIN_STEPS // 2:
        raise UsageError(f"the loss diverges within {len(swept.losses)} steps from {low:g} on; lower --min")
    start = float(swept.losses[: max(3, steps // 10)].mean())
    # What diverges would bend the lines beside it.
    capped = np.minimum(swept.losses_after_update, start + max(start - float(swept.losses.min()), 1e-12))
    width = max(2, round(HALF * steps / math.log10(high / low)))
    smoothed, slope = _lines(capped, width)
    lowest = int(smoothed.argmin())
    around = capped[max(0, lowest - width) : lowest + width + 1]
    noise = 1.4826 * float(np.median(np.abs(capped - smoothed)))  # a deviation that what diverges does not change
    error = noise * math.sqrt(1 / max(3, steps // 10) + 1 / len(around))
    fall, between = start - float(around.mean()), f"between the rates {low:g} and {swept.rates[-1]:g}"
    if lowest == 0 or fall <= 1e-3 * abs(start):
        raise UsageError(
            f"the loss never falls {between}, where it begins at {start:.4g}; try another range (--min, --max), or give "
            "training.learning_rate a number"
        )
    if fall <= NOISE * error:
        raise UsageError(
            f"{between} the loss falls from {start:.4g} to {start - fall:.4g} at best, too little to tell where batches "
            f"differ by {noise:.2g}; try a larger training.batch_size or more --steps, or give training.learning_rate a number"
        )
    steepest = int(slope[: lowest + 1].argmin())
    above = lowest + np.flatnonzero(smoothed[lowest:] > start)
    end = int(above[0]) if len(above) else len(swept.rates) - 1
    return RangeTestResult(
        steepest=float(swept.rates[steepest]),
        minimum=float(swept.rates[lowest]),
        start_loss=start,
        lowest_loss=float(smoothed[lowest]),
        smoothed=smoothed,
        is_still_falling=not swept.diverged and lowest == len(smoothed) - 1,
        diverges_at=float(swept.rates[end]) if swept.diverged else None,
    )


def _lines(values: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Of a line fitted around each point, near ones counting more: its height and its slope there."""
    places = np.arange(len(values))
    heights, slopes = np.empty(len(values)), np.empty(len(values))
    for at in places:
        away = places - at
        weight = np.maximum(0.0, 1 - (away / (width + 1)) ** 2)
        slopes[at], heights[at] = np.polyfit(away, values, 1, w=np.sqrt(weight))
    return heights, slopes
