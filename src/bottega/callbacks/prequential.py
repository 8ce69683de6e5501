"""What a stream was told before it was learnt from: means over all samples so far, each measured once, when it was new."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from bottega.core.callback import Callback, Progress
from bottega.core.types import Sums

PREFIX = "online/"


@final
class Prequential(Callback):
    """Sums of every step, added up where they were computed; a number is asked for only where it is said or saved."""

    name = "prequential"

    def __init__(self, summarise: Callable[[dict[str, float]], dict[str, float]]) -> None:
        """`summarise` says of means what else follows from them, as of an evaluation."""
        self.summarise = summarise
        self.sums: Sums = {}

    def add(self, sums: Mapping[str, tuple[Any, Any]]) -> None:
        for name, (total, count) in sums.items():
            old = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (old[0] + total, old[1] + count)

    def compute_metrics(self) -> dict[str, float]:
        """As they stand; what no sample has counted for yet is not there."""
        sums = {name: (float(total), float(count)) for name, (total, count) in self.sums.items()}
        means = {name: total / count for name, (total, count) in sums.items() if count}
        return {PREFIX + name: value for name, value in self.summarise(means).items()} if means else {}

    def add_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        return {**metrics, **self.compute_metrics()}

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        metrics |= self.compute_metrics()  # those who write them down come after this one

    def state_dict(self) -> dict[str, Any]:
        return {name: [float(total), float(count)] for name, (total, count) in self.sums.items()}

    def load_state_dict(self, note: dict[str, Any]) -> None:
        self.sums = {name: (float(total), float(count)) for name, (total, count) in note.items()}
