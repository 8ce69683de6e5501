"""Learning-rate range test (Smith, 2017): raise the rate step by step until the loss diverges, and suggest a rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bottega.core.engine import Engine
from bottega.core.errors import UsageError

MIN_NUM_STEPS, NUM_STEPS, LOWEST_RATE, HIGHEST_RATE = 10, 100, 1e-7, 10.0
"""Fewest steps from which a slope can be distinguished from noise, and the defaults of the test."""
MOMENTUM = 0.7
"""Momentum of the running mean that detects divergence; the mean is over about three steps."""
HALF_WIDTH_DECADES = 0.5
"""Around each rate a line is fitted to the losses within this many decades on either side. A narrower window follows the noise:
on a logistic fall with noise of 5 % of its height, the steepest rate scatters by 0.12 decades, and by 0.43 with half this
width. A wider one reaches into the divergence after the fall."""
SAFETY_FACTOR = 0.5
"""The suggestion is this fraction of the steepest rate: too low a rate makes training slow, too high a rate makes it diverge.
Final losses with one seed: the convolutional classifier of the embedded docstrings (300 steps) has 1.47 at the steepest rate
and 0.94 at about half of it, where the best of five rates has 0.84; a small language model (200 steps) has 4.34 at the steepest
rate, 4.85 at half and 3.93 at twice that rate, so half is too low for it."""
MIN_STANDARD_ERRORS = 3.5
"""The loss must fall by this many standard errors to count as falling. The minimum is the lowest of many means, and so lies
below the start by chance: of 1,000 sweeps of pure noise 5 count as falling, and 168 would with two standard errors."""


class BatchStreamFactory(Protocol):
    """Returns a generator of the batches from a step on, such as a Loader; the batch of a step is always the same."""

    def __call__(self, step: int) -> Any: ...


@dataclass(frozen=True)
class RateSweep:
    """Result of a sweep: `losses[i]` and `losses[i + 1]` are before and after the update with `rates[i]`."""

    rates: np.ndarray
    losses: np.ndarray
    diverged: bool

    @property
    def losses_after_update(self) -> np.ndarray:
        """The loss after the update with each rate."""
        return self.losses[1:]


@dataclass(frozen=True)
class RangeTestResult:
    """The rates at which the loss fell fastest and was lowest, and the smoothed losses."""

    steepest: float
    minimum: float
    start_loss: float
    lowest_loss: float
    smoothed: np.ndarray
    is_still_falling: bool
    """Whether the loss was still falling at the highest rate."""
    diverges_at: float | None
    """The rate from which the loss, after its minimum, is above its start; the sweep notices divergence some steps later. None if
    the sweep reached the highest rate without divergence."""

    @property
    def suggestion(self) -> float:
        """Rate to train with, rounded to three digits so that the printed value is the one used."""
        return float(f"{SAFETY_FACTOR * self.steepest:.2e}")


def check_range(low: float, high: float, steps: int) -> None:
    """Raise UsageError if the range of rates or the number of steps is not valid."""
    if not 0 < low < high < math.inf:
        raise UsageError(f"--min {low:g} --max {high:g}: both must be positive, and --min below --max")
    if steps < MIN_NUM_STEPS:
        raise UsageError(f"--steps {steps}: expected {MIN_NUM_STEPS} or more")


def sweep_learning_rates(
    engine: Engine,
    open_batches: BatchStreamFactory,
    *,
    low: float = LOWEST_RATE,
    high: float = HIGHEST_RATE,
    steps: int = NUM_STEPS,
    first_step: int = 0,
    report_progress: Callable[[int, int], None] = lambda done, total: None,
) -> RateSweep:
    """Train with rates from `low` to `high`, spaced geometrically, until the loss diverges.

    The losses are the same on all ranks, so all of them stop at the same step.
    """
    check_range(low, high, steps)
    rates = np.geomspace(low, high, steps)
    engine.rate = lambda step: float(rates[min(step - first_step, steps - 1)])
    losses: list[float] = []
    running_mean, best, diverged = 0.0, math.inf, False
    with closing(open_batches(first_step)) as stream:
        for number, batch in zip(range(steps + 1), stream, strict=False):
            metrics = engine.fetch(engine.train_step(first_step + number, batch))
            loss = metrics["loss"]
            diverged = bool(metrics.get("bad_steps", 0)) or not math.isfinite(loss)
            if diverged:
                break
            losses.append(loss)
            running_mean = loss if number == 0 else MOMENTUM * running_mean + (1 - MOMENTUM) * loss
            best = min(best, running_mean)
            report_progress(number, steps)
            diverged = running_mean > _compute_divergence_limit(losses, best)
            if diverged:
                break
    return RateSweep(rates[: max(0, len(losses) - 1)], np.array(losses), diverged)


def _compute_divergence_limit(losses: list[float], best: float) -> float:
    """Return the loss above which training has diverged: start + max(start - best, half of |start|)."""
    start = float(np.mean(losses[:3]))
    return start + max(start - best, 0.5 * abs(start))


def analyse_sweep(sweep: RateSweep, *, low: float, high: float, steps: int) -> RangeTestResult:
    """Find the rate at which the loss falls fastest over log(rate), before its minimum; raise UsageError if it never falls."""
    if len(sweep.losses) == 0:
        raise UsageError("the loss or its gradient is not finite before the first update; check the data and the model")
    if len(sweep.rates) < MIN_NUM_STEPS // 2:
        raise UsageError(f"the loss diverges within {len(sweep.losses)} steps of the lowest rate {low:g}; lower --min")
    start = float(sweep.losses[: max(3, steps // 10)].mean())
    # Capped, because diverging losses would bend the lines fitted beside them.
    capped_losses = np.minimum(sweep.losses_after_update, start + max(start - float(sweep.losses.min()), 1e-12))
    half_width = max(2, round(HALF_WIDTH_DECADES * steps / math.log10(high / low)))
    smoothed, slope = _fit_local_lines(capped_losses, half_width)
    lowest_index = int(smoothed.argmin())
    losses_near_minimum = capped_losses[max(0, lowest_index - half_width) : lowest_index + half_width + 1]
    # A robust standard deviation, unaffected by diverging losses.
    noise = 1.4826 * float(np.median(np.abs(capped_losses - smoothed)))
    standard_error = noise * math.sqrt(1 / max(3, steps // 10) + 1 / len(losses_near_minimum))
    decrease = start - float(losses_near_minimum.mean())
    tested_range = f"between the rates {low:g} and {sweep.rates[-1]:g}"
    if lowest_index == 0 or decrease <= 1e-3 * abs(start):
        raise UsageError(
            f"the loss never falls {tested_range} (it starts at {start:.4g}); try another range (--min, --max), or set "
            "training.learning_rate to a number"
        )
    if decrease <= MIN_STANDARD_ERRORS * standard_error:
        raise UsageError(
            f"{tested_range} the loss falls only from {start:.4g} to {start - decrease:.4g}, while batches differ by {noise:.2g}; "
            "use a larger training.batch_size or more --steps, or set training.learning_rate to a number"
        )
    steepest_index = int(slope[: lowest_index + 1].argmin())
    indices_above_start = lowest_index + np.flatnonzero(smoothed[lowest_index:] > start)
    divergence_index = int(indices_above_start[0]) if len(indices_above_start) else len(sweep.rates) - 1
    return RangeTestResult(
        steepest=float(sweep.rates[steepest_index]),
        minimum=float(sweep.rates[lowest_index]),
        start_loss=start,
        lowest_loss=float(smoothed[lowest_index]),
        smoothed=smoothed,
        is_still_falling=not sweep.diverged and lowest_index == len(smoothed) - 1,
        diverges_at=float(sweep.rates[divergence_index]) if sweep.diverged else None,
    )


def _fit_local_lines(values: np.ndarray, half_width: int) -> tuple[np.ndarray, np.ndarray]:
    """Fit a line to the values within `half_width` of each point, the nearer the heavier; return its heights and slopes there."""
    positions = np.arange(len(values))
    heights, slopes = np.empty(len(values)), np.empty(len(values))
    for position in positions:
        offsets = positions - position
        weight = np.maximum(0.0, 1 - (offsets / (half_width + 1)) ** 2)
        slopes[position], heights[position] = np.polyfit(offsets, values, 1, w=np.sqrt(weight))
    return heights, slopes
