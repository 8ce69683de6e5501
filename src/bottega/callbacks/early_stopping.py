"""Early stopping, and reducing the learning rate on a plateau of a validation metric."""

from __future__ import annotations

import math
from typing import Any

from bottega.core.callback import Callback, Progress
from bottega.core.errors import UsageError


class PatienceCounter:
    """Counts the evaluations since a metric last improved by more than `threshold`."""

    def __init__(self, *, metric: str, maximise: bool, threshold: float, key: str) -> None:
        self.metric, self.maximise, self.threshold, self.key = metric, maximise, threshold, key
        self.best: float | None = None
        self.num_waited = 0

    def update(self, metrics: dict[str, float]) -> None:
        """Count one evaluation; a value that is not finite is not an improvement."""
        if self.metric not in metrics:
            raise UsageError(f"{self.key}.metric: {self.metric!r} is not measured; choose from {', '.join(metrics)}")
        value = metrics[self.metric]
        best = self.best if self.best is not None else (-math.inf if self.maximise else math.inf)
        gain = value - best if self.maximise else best - value
        if math.isfinite(value) and gain > self.threshold:
            self.best, self.num_waited = value, 0
        else:
            self.num_waited += 1

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.num_waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.num_waited = state.get("best"), int(state.get("waited", 0))


class EarlyStopping(Callback):
    """Ends the run after `patience` evaluations without improvement."""

    name = "early_stop"

    def __init__(self, *, metric: str, maximise: bool, patience: int, threshold: float) -> None:
        self.patience = patience
        self.counter = PatienceCounter(
            metric=metric, maximise=maximise, threshold=threshold, key="training.early_stopping"
        )

    def start(self, progress: Progress) -> None:
        self._stop_if_patience_ended(progress)  # a stopped run stays stopped when it is resumed

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self.counter.update(metrics)
        self._stop_if_patience_ended(progress)

    def _stop_if_patience_ended(self, progress: Progress) -> None:
        if self.counter.num_waited >= self.patience:
            best = self.counter.best
            problem = f"has not improved on {best:.4f}" if best is not None else "was not finite"
            progress.stop = f"{self.counter.metric} {problem} for {self.patience} evaluations"

    def state_dict(self) -> dict[str, Any]:
        return self.counter.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counter.load_state_dict(state)


class ReduceOnPlateau(Callback):
    """Multiplies the learning rate by `factor` after `patience` evaluations without improvement.

    `floor` is the smallest product of these factors. This is the only schedule that is not a function of the step; its
    state is `Progress.learning_rate_scale`.
    """

    name = "plateau"

    def __init__(
        self, *, metric: str, maximise: bool, patience: int, threshold: float, factor: float, floor: float
    ) -> None:
        self.patience, self.factor, self.floor = patience, factor, floor
        self.counter = PatienceCounter(metric=metric, maximise=maximise, threshold=threshold, key="training.scheduler")

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self.counter.update(metrics)
        if self.counter.num_waited >= max(1, self.patience):
            progress.learning_rate_scale = max(self.floor, progress.learning_rate_scale * self.factor)
            self.counter.num_waited = 0

    def state_dict(self) -> dict[str, Any]:
        return self.counter.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counter.load_state_dict(state)
