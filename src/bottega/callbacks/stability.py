"""Stability of training: loss spikes, skipped steps and the spread of the gradient norm, added to the metrics of each log."""

from __future__ import annotations

import math
import statistics
from typing import Any

from bottega.core.callback import Callback, Progress

WINDOW = 50
"""Logged values that a new one is compared with."""
MIN_LOSSES = 10
"""Losses before the first that can be a spike: the spread of fewer says little."""
MIN_DEVIATION = 1e-3
"""Smallest deviation that counts, as a share of the median: a loss that is almost constant has no spikes of rounding."""
SPIKE_DEVIATIONS = 5.0
"""Median absolute deviations above the median from which a loss is a spike."""


class Stability(Callback):
    """Adds the stability of the run so far to the metrics; must come before the callbacks that write them."""

    name = "stability"

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._num_spikes = self._num_skipped = 0

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        loss, norm = metrics.get("loss", math.nan), metrics.get("grad_norm", math.nan)
        self._num_spikes += is_spike(loss, self._losses)
        self._losses = _append_finite(self._losses, loss)
        self._norms = _append_finite(self._norms, norm)
        self._num_skipped += int(metrics.get("skipped_steps", 0))
        metrics["loss_spikes"] = self._num_spikes
        # Steps that a rollback passes over are in the progress; they are not counted as they are met again.
        num_passed = sum(step < progress.step for step in progress.skip_steps)
        metrics["skipped_steps"] = self._num_skipped + num_passed
        mean = statistics.fmean(self._norms) if self._norms else 0.0
        if mean > 0:
            metrics["grad_norm_spread"] = statistics.pstdev(self._norms) / mean

    def state_dict(self) -> dict[str, Any]:
        return {
            "losses": self._losses,
            "norms": self._norms,
            "loss_spikes": self._num_spikes,
            "skipped_steps": self._num_skipped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses, self._norms = list(state.get("losses", ())), list(state.get("norms", ()))
        self._num_spikes = int(state.get("loss_spikes", 0))
        self._num_skipped = int(state.get("skipped_steps", 0))


def is_spike(loss: float, earlier_losses: list[float]) -> bool:
    """Return whether a loss exceeds the median of earlier ones by more than SPIKE_DEVIATIONS median absolute deviations."""
    if len(earlier_losses) < MIN_LOSSES:
        return False
    median = statistics.median(earlier_losses)
    deviation = statistics.median([abs(earlier - median) for earlier in earlier_losses])
    deviation = max(deviation, MIN_DEVIATION * abs(median))
    return deviation > 0 and loss > median + SPIKE_DEVIATIONS * deviation


def _append_finite(values: list[float], value: float) -> list[float]:
    return [*values, value][-WINDOW:] if math.isfinite(value) else values
