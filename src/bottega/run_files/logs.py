"""The logs of a run as series of points, thinned so that their memory is bounded and no extreme value is lost."""

from __future__ import annotations

import itertools
import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bottega.metrics_log import iterate_rows

MAX_BUFFERED_POINTS = 1 << 18
"""Points of a series that are read before it is thinned, which bounds the memory of a log with millions of lines."""
MAX_READ_POINTS = 1 << 15
"""Points of a series after reading."""
ROW_FIELDS = frozenset({"step", "kind", "samples"})
"""Fields of a row that are not metrics; the numbers among them are whole."""


class ThinnedPoints(NamedTuple):
    """Some points of a series, (n,) each."""

    steps: np.ndarray
    samples: np.ndarray
    values: np.ndarray
    means: np.ndarray
    """The mean of the interval that a point stands for: what a smoothed curve is drawn from, since extremes alone would mislead."""
    weights: np.ndarray
    """Number of logged values that a point stands for."""


class Series:
    """Points of one metric: step, samples seen, and value. A long series is thinned while it is read."""

    def __init__(self) -> None:
        self.steps, self.samples, self.values = array("d"), array("d"), array("d")
        self.num_added = 0
        """Number of points that were added, before any thinning."""
        self._means, self._weights = array("d"), array("d")
        """Of the points that were thinned already, which come first; others are their own mean and have weight 1."""

    def add(self, step: float, samples: float, value: float) -> None:
        """Append a point."""
        self.num_added += 1
        self.steps.append(step)
        self.samples.append(samples)
        self.values.append(value)
        if len(self.values) >= MAX_BUFFERED_POINTS:
            columns = (array("d", column) for column in self.thin(MAX_READ_POINTS))
            self.steps, self.samples, self.values, self._means, self._weights = columns

    def __len__(self) -> int:
        return len(self.values)

    def thin(self, count: int) -> ThinnedPoints:
        """Return at most `count` points: the first, the last, and the smallest and largest value of equal intervals."""
        values = np.array(self.values, np.float64)
        num_new = len(values) - len(self._means)
        means = np.concatenate([np.array(self._means), values[len(values) - num_new :]])
        weights = np.concatenate([np.array(self._weights), np.ones(num_new)])
        index, bounds = select_points(values, count)
        if len(index) < len(values):
            totals, sums = (np.add.reduceat(column, bounds[:-1]) for column in (weights, weights * means))
            interval = np.searchsorted(bounds, index, side="right") - 1
            means[index] = (sums / totals)[interval]
            weights[index] = (totals / np.bincount(interval, minlength=len(totals)))[interval]
        steps, samples = np.array(self.steps, np.float64), np.array(self.samples, np.float64)
        return ThinnedPoints(*(column[index] for column in (steps, samples, values, means, weights)))


def select_points(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of at most `count` points, in order, and the bounds of the intervals that they stand for.

    They are the first, the last, and the smallest and largest value of each interval, so that no extreme value is lost.
    """
    length = len(values)
    if length <= count:
        return np.arange(length), np.arange(length + 1)
    num_intervals = max(1, (count - 2) // 2)
    bounds = np.linspace(0, length, num_intervals + 1).astype(np.int64)
    extremes = [
        start + index
        for start, stop in itertools.pairwise(bounds)
        for index in (values[start:stop].argmin(), values[start:stop].argmax())
    ]
    return np.unique([0, *extremes, length - 1]), bounds


@dataclass
class MetricsLog:
    """The series of a metrics.jsonl by (kind, metric), the last value of each, and what could not be read."""

    series: dict[tuple[str, str], Series] = field(default_factory=dict)
    last_rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The last row of each kind."""
    num_rows: int = 0
    num_bad_lines: int = 0
    num_nonfinite: dict[str, int] = field(default_factory=dict)
    """Metric -> number of values that were not finite; that of an evaluation is "validation METRIC"."""
    seconds: float = 0.0
    """Time spent in training steps, without evaluations and checkpoints."""

    def get(self, kind: str, metric: str) -> Series | None:
        return self.series.get((kind, metric))


def read_metrics_log(path: Path) -> MetricsLog:
    """Read a metrics.jsonl. Lines that are damaged are counted and left out."""
    log = MetricsLog()
    last_step = 0.0
    for row in iterate_rows(path):
        if row is None or not is_step(row.get("step")) or row.get("kind") not in ("train", "eval"):
            log.num_bad_lines += 1
            continue
        log.num_rows += 1
        step, kind = float(row["step"]), row["kind"]
        samples = float(row["samples"]) if is_number(row.get("samples")) else step
        log.last_rows[kind] = row
        if kind == "train" and is_number(row.get("step_seconds")):
            log.seconds += float(row["step_seconds"]) * max(0.0, step - last_step)
            last_step = step
        for name, value in row.items():
            # The type of a float is tested first, because a long log has millions of them.
            if (type(value) is float and math.isfinite(value)) or (is_number(value) and name not in ROW_FIELDS):
                series = log.series.get((kind, name))
                if series is None:
                    series = log.series[kind, name] = Series()
                series.add(step, samples, float(value))
            elif name not in ROW_FIELDS and (value is None or isinstance(value, int | float)):
                key = name if kind == "train" else f"validation {name}"
                log.num_nonfinite[key] = log.num_nonfinite.get(key, 0) + 1
    return log


@dataclass
class ModuleLog:
    """The series of a modules.jsonl by statistic and module, and how many lines could not be read."""

    series: dict[str, dict[str, Series]] = field(default_factory=dict)
    num_bad_lines: int = 0


def read_module_log(path: Path) -> ModuleLog:
    """Read a modules.jsonl. Lines that are damaged are counted and left out."""
    log = ModuleLog()
    for row in iterate_rows(path):
        if row is None or not is_step(row.get("step")) or not isinstance(row.get("modules"), dict):
            log.num_bad_lines += 1
            continue
        samples = float(row["samples"]) if is_number(row.get("samples")) else float(row["step"])
        for module, values in row["modules"].items():
            for name, value in values.items() if isinstance(values, dict) else ():
                if is_number(value):
                    series = log.series.setdefault(str(name), {}).setdefault(str(module), Series())
                    series.add(float(row["step"]), samples, float(value))
    return log


def is_step(value: Any) -> bool:
    """Return whether a value from JSON can be the number of a step."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def is_number(value: Any) -> bool:
    """Return whether a value from JSON is a finite number; true and false are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False
