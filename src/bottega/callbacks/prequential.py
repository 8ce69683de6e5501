"""Prequential evaluation of a stream: means over all samples so far, each measured before the model was trained on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from bottega.core.callback import Callback, Progress
from bottega.core.types import Sums

PREFIX = "online/"


@final
class Prequential(Callback):
    """Accumulates the sums of every step on their device; they are read only when they are logged or saved."""

    name = "prequential"

    def __init__(self, summarise: Callable[[dict[str, float]], dict[str, float]]) -> None:
        """`summarise` derives further metrics from means, as for an evaluation."""
        self.summarise = summarise
        self.sums: Sums = {}

    def add(self, sums: Mapping[str, tuple[Any, Any]]) -> None:
        """Add the (total, count) of each metric of one step."""
        for name, (total, count) in sums.items():
            previous = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (previous[0] + total, previous[1] + count)

    def compute_metrics(self) -> dict[str, float]:
        """Return the means so far, named online/...; a metric without samples so far is left out."""
        means = {name: total / count for name, (total, count) in self._read_sums().items() if count}
        return {PREFIX + name: value for name, value in self.summarise(means).items()} if means else {}

    def add_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return `metrics` with the means so far."""
        return {**metrics, **self.compute_metrics()}

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        metrics |= self.compute_metrics()  # callbacks that write metrics come after this one

    def state_dict(self) -> dict[str, Any]:
        return {name: list(values) for name, values in self._read_sums().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = {name: (float(total), float(count)) for name, (total, count) in state.items()}

    def _read_sums(self) -> dict[str, tuple[float, float]]:
        """Return the sums as floats, and go on from them: what was read does not stay on the device."""
        read = {name: (float(total), float(count)) for name, (total, count) in self.sums.items()}
        self.sums = dict(read)
        return read
