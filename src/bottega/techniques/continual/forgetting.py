"""Forgetting in a sequence of sources: the matrix of metrics of each source after each source, and its summary."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, final

import numpy as np

from bottega.callbacks.console import Console
from bottega.core.callback import Callback, Progress
from bottega.core.rundir import RunDirectory
from bottega.core.trainer import BestMetric
from bottega.plots.figure import try_plot
from bottega.plots.heatmap import plot_forgetting

MATRIX_FILE, PLOT_FILE = "forgetting.json", "forgetting.png"
FALLBACK_METRIC = "loss"
"""The metric that every task reports per source."""

Matrix = Sequence[Sequence[float | None]]


def compute_transfer_metrics(matrix: np.ndarray, *, maximise: bool) -> dict[str, float]:
    """Return the average, backward transfer and forgetting of R `(n, n)`, where R[i, j] is source j after training on i.

    `average` is the mean of the last row. Backward transfer (Lopez-Paz and Ranzato, 2017) is how much later sources
    changed the metric measured right after a source; forgetting (Chaudhry et al., 2018) is how far each source is below
    its best. An improvement is positive transfer and negative forgetting, also for a metric that is minimised.
    """
    score = matrix if maximise else -matrix
    last, right_after, best = score[-1, :-1], score.diagonal()[:-1], score[:-1, :-1].max(axis=0)
    return {
        "average": float(matrix[-1].mean()),
        "backward_transfer": float((last - right_after).mean()),
        "forgetting": float((best - last).mean()),
    }


@final
class ForgettingMatrix(Callback):
    """Records the metrics of all sources after each source, and writes the matrix at the end of the run."""

    name = "forgetting"

    def __init__(self, names: tuple[str, ...], best_metric: BestMetric) -> None:
        self.names, self.best_metric = names, best_metric
        self.first_steps: tuple[int, ...] = ()
        """The first step of each source."""
        self.metric = best_metric.metric
        self.rows: dict[int, list[float | None]] = {}
        """The rows of the matrix so far, by the index of the source just trained on."""
        self._progress = Progress()

    @property
    def maximise(self) -> bool:
        """Whether a larger value of the metric is better."""
        return self.best_metric.maximise and self.metric == self.best_metric.metric

    @property
    def matrix(self) -> Matrix:
        """Row i: the metric of every source after training on source i; None where it was not evaluated."""
        count = len(self.names)
        return [self.rows.get(index, [None] * count) for index in range(count)]

    def start(self, progress: Progress) -> None:
        self._progress = progress

    def state_dict(self) -> dict[str, Any]:
        rows = {str(index): row for index, row in self.rows.items()}
        return {"metric": self.metric, "rows": rows} if rows else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.metric = str(state.get("metric", self.best_metric.metric))
        self.rows = {int(index): list(row) for index, row in state.get("rows", {}).items()}

    def summarise(self, metrics: dict[str, float]) -> dict[str, float]:
        """Record the row of the matrix at the end of a source; at the end of the run, add the summary to `metrics`."""
        ends = [*self.first_steps[1:], self._progress.total]
        if self._progress.step not in ends:
            return metrics
        self.metric = (
            self.best_metric.metric if f"{self.names[0]}/{self.best_metric.metric}" in metrics else FALLBACK_METRIC
        )
        values = [metrics[f"{name}/{self.metric}"] for name in self.names]
        self.rows[ends.index(self._progress.step)] = [value if math.isfinite(value) else None for value in values]
        return {**metrics, **self.compute_summary()} if self._progress.step == ends[-1] else metrics

    def compute_summary(self) -> dict[str, float]:
        """Return average, backward transfer and forgetting; empty if a value of the matrix is missing."""
        values = [value for row in self.matrix for value in row if value is not None]
        is_complete = len(values) == len(self.names) ** 2
        return (
            compute_transfer_metrics(np.array(values).reshape(len(self.names), -1), maximise=self.maximise)
            if is_complete
            else {}
        )

    def write(self, directory: RunDirectory, console: Console) -> None:
        """Write the matrix as JSON and as a plot, and print it; a run that stopped early has only its first rows."""
        if not self.rows:
            return
        fields = {"metric": self.metric, "mode": "max" if self.maximise else "min", "sources": list(self.names)}
        file = directory.path / MATRIX_FILE
        directory.write(file, json.dumps({**fields, "matrix": self.matrix, **self.compute_summary()}, indent=1) + "\n")
        plot = partial(plot_forgetting, self.matrix, self.names, metric=self.metric, maximise=self.maximise)
        try_plot(plot, directory.path / PLOT_FILE, warn=console.warn)
        console.info("\n" + format_matrix(self.matrix, self.names, metric=self.metric, summary=self.compute_summary()))


def format_matrix(matrix: Matrix, names: Sequence[str], *, metric: str, summary: dict[str, float]) -> str:
    """Return the matrix and its summary as a table for the console."""
    column_width = max(10, *(len(name) + 2 for name in names))
    name_width = max(6, *(len(name) for name in names))
    lines = [f"{metric} of each source (columns) after training on each (rows)"]
    lines.append(" " * name_width + "".join(f"{name:>{column_width}}" for name in names))
    for name, row in zip(names, matrix, strict=True):
        cells = ("-" if value is None else f"{value:.4f}" for value in row)
        lines.append(f"{name:<{name_width}}" + "".join(f"{cell:>{column_width}}" for cell in cells))
    summary_texts = [f"{name.replace('_', ' ')} {value:+.4f}" for name, value in summary.items() if name != "average"]
    if summary:
        lines.append(f"average {summary['average']:.4f}, {', '.join(summary_texts)}")
    return "\n".join(lines)
