"""Rules that act on evaluations: stop when nothing improves, or lower the rate first."""

from __future__ import annotations

import math
from typing import Any

from bottega.core.callback import Callback, Progress
from bottega.core.errors import UsageError


class PatienceCounter:
    """Counts evaluations without an improvement of more than `threshold`."""

    def __init__(self, *, metric: str, maximise: bool, threshold: float, key: str) -> None:
        self.metric, self.maximise, self.threshold, self.key = metric, maximise, threshold, key
        self.best: float | None = None
        self.waited = 0

    def update(self, metrics: dict[str, float]) -> None:
        if self.metric not in metrics:
            raise UsageError(f"{self.key}.metric: {self.metric!r} was not measured; there is {', '.join(metrics)}")
        value = metrics[self.metric]
        best = self.best if self.best is not None else (-math.inf if self.maximise else math.inf)
        gain = value - best if self.maximise else best - value
        # A value that is no number is no improvement, whatever it is compared with.
        if math.isfinite(value) and gain > self.threshold:
            self.best, self.waited = value, 0
        else:
            self.waited += 1

    def note(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def recall(self, note: dict[str, Any]) -> None:
        self.best, self.waited = note.get("best"), int(note.get("waited", 0))


class EarlyStopping(Callback):
    name = "early_stop"

    def __init__(self, *, metric: str, maximise: bool, patience: int, threshold: float) -> None:
        self.patience = patience
        self.counter = PatienceCounter(
            metric=metric, maximise=maximise, threshold=threshold, key="training.early_stopping"
        )

    def start(self, progress: Progress) -> None:
        self._decide(progress)  # a run that was stopped stays stopped when it is started again

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self.counter.update(metrics)
        self._decide(progress)

    def _decide(self, progress: Progress) -> None:
        if self.counter.waited >= self.patience:
            best = f"{self.counter.best:.4f}" if self.counter.best is not None else "nothing"
            progress.stop = f"{self.counter.metric} has not improved on {best} for {self.patience} evaluations"

    def state_dict(self) -> dict[str, Any]:
        return self.counter.note()

    def load_state_dict(self, note: dict[str, Any]) -> None:
        self.counter.recall(note)


class ReduceOnPlateau(Callback):
    """The one schedule that cannot be a function of the step: it lives in `Progress.rate_scale`."""

    name = "plateau"

    def __init__(
        self, *, metric: str, maximise: bool, patience: int, threshold: float, factor: float, floor: float
    ) -> None:
        self.patience, self.factor, self.floor = patience, factor, floor
        self.counter = PatienceCounter(metric=metric, maximise=maximise, threshold=threshold, key="training.scheduler")

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self.counter.update(metrics)
        if self.counter.waited >= max(1, self.patience):
            progress.rate_scale = max(self.floor, progress.rate_scale * self.factor)
            self.counter.waited = 0

    def state_dict(self) -> dict[str, Any]:
        return self.counter.note()

    def load_state_dict(self, note: dict[str, Any]) -> None:
        self.counter.recall(note)
