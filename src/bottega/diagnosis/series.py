"""Logged values as arrays, for rules: bounded in length, and raising NotRecorded if there are too few."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bottega.diagnosis.finding import NotRecorded
from bottega.models.text_classifier.config import NGRAM_MODULE
from bottega.run_files.logs import Series
from bottega.run_files.record import RunRecord

MAX_POINTS = 2000
"""Points of a longer log, each with the mean of the interval it stands for."""
MIN_TRAIN_ROWS = 8
"""Logged steps from which a curve can be judged: two in each quarter of the run."""
FINISHED_FRACTION = 0.9
"""Fraction of the planned steps from which a run is judged as a finished one; its last steps may not be logged."""
CONVERGED_FRACTION = 0.05
"""Final training loss, as a fraction of its start, below which a run has converged, whatever its curve looks like."""
DECAYED_RATE = 0.3
"""Final learning rate, as a fraction of the peak, below which a schedule counts as completed."""
CROSS_ENTROPY_TASKS = ("language", "classify")
MAX_INITIAL_CROSS_ENTROPY = 12.0
"""Nats above any initial cross-entropy (a vocabulary of 50,000 starts at 10.8): if the first logged loss is higher, the run
had diverged before it was logged."""
HIGH_RATE = 0.5
"""Fraction of the peak learning rate above which a step counts as one at the rate of the recipe, not of its warm-up or decay."""


def get_metric(record: RunRecord, kind: str, metric: str, *, minimum: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of a metric, (n,) each; `kind` is train or eval. Raise NotRecorded for fewer than `minimum`."""
    series = record.log.get(kind, metric)
    if series is None or len(series) < minimum:
        count = 0 if series is None else len(series)
        noun, key = ("evaluation", "evaluation.every") if kind == "eval" else ("logged step", "logging.every")
        raise NotRecorded(
            f"{count} {noun}{'s' if count != 1 else ''} with {metric}, at least {minimum} needed; see {key}"
        )
    return thin(series)


def thin(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of at most MAX_POINTS points."""
    points = series.thin(MAX_POINTS)
    return points.steps, points.means


@dataclass(frozen=True)
class TrainingCurve:
    """The training loss of a run and the learning rate that it was trained with."""

    steps: np.ndarray
    losses: np.ndarray
    start: float
    """The highest of the first three logged losses, since some runs have halved it before the second log."""
    quarters: tuple[float, float, float, float]
    """Median loss of each quarter of the logged steps."""
    final_rate: float
    """Learning rate of the last logged step, as a fraction of the highest."""

    @property
    def end(self) -> float:
        """The median loss of the last quarter."""
        return self.quarters[3]

    @property
    def is_decayed(self) -> bool:
        """Whether the learning rate ended far below its peak, as a schedule that was completed leaves it."""
        return self.final_rate < DECAYED_RATE

    def is_flat(self, fraction: float) -> bool:
        """Return whether the loss fell by less than `fraction` of its start over the second half of the run."""
        return self.quarters[1] - self.quarters[3] < fraction * abs(self.start)


def get_training_curve(record: RunRecord, *, minimum: int = MIN_TRAIN_ROWS) -> TrainingCurve:
    """Return the training loss. Raise NotRecorded for a short log, or if the data changed during training."""
    if not has_one_distribution(record):
        raise NotRecorded("the data changes during training, so the loss of different steps cannot be compared")
    steps, losses = get_metric(record, "train", "loss", minimum=minimum)
    _, rates = get_rates(record)
    quarters = [float(np.median(part)) for part in np.array_split(losses, 4)]
    return TrainingCurve(
        steps,
        losses,
        min(float(losses[:3].max()), MAX_INITIAL_CROSS_ENTROPY if is_cross_entropy(record) else math.inf),
        (quarters[0], quarters[1], quarters[2], quarters[3]),
        float(rates[-1] / rates.max()),
    )


def get_task(record: RunRecord) -> str:
    """Return the task of the recipe. Raise NotRecorded if the recipe cannot be read."""
    task = record.get("task")
    if not isinstance(task, str):
        raise NotRecorded("the task, because recipe.yaml cannot be read")
    return task


def require_data(record: RunRecord) -> None:
    """Raise NotRecorded without the summary of the data."""
    if not record.data:
        raise NotRecorded("data.json is missing or cannot be read")


def is_cross_entropy(record: RunRecord) -> bool:
    """Return whether the training loss is a plain cross-entropy in nats."""
    return record.get("task") in CROSS_ENTROPY_TASKS and not record.get("techniques")


def get_num_steps(record: RunRecord) -> int:
    """Return the planned number of steps."""
    steps = record.environment.get("steps") or record.state.get("total")
    if not isinstance(steps, int) or steps < 1:
        raise NotRecorded("the number of steps of the run is not in environment.json")
    return steps


def require_finished(record: RunRecord) -> None:
    """Raise NotRecorded for a run that still trains or was stopped: its schedule may have most of its effect at the end."""
    steps, _ = get_metric(record, "train", "loss")
    if record.state.get("state") == "finished":
        return  # perhaps by early stopping, before its last planned step
    if steps[-1] < FINISHED_FRACTION * (total := get_num_steps(record)):
        raise NotRecorded(f"the run has {int(steps[-1]):,} of {total:,} steps; this is judged at its end")


def has_one_distribution(record: RunRecord) -> bool:
    """Return whether all steps drew from the same data, unlike a sequence of sources, a curriculum or a stream."""
    return (
        record.get("data.mixture") != "sequence"
        and record.get("data.curriculum") is None
        and record.get("data.online") is None
    )


def get_rates(record: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Return the logged steps and learning rates; raise NotRecorded if there are none above zero."""
    steps, rates = get_metric(record, "train", "learning_rate", minimum=2)
    if rates.max() <= 0:
        raise NotRecorded("no learning rate above zero")
    return steps, rates


def get_median_update_ratio(record: RunRecord) -> float:
    """Return the median over modules of the median update-to-weight ratio at high learning rate."""
    rate_steps, rates = get_rates(record)
    ratios: list[float] = []
    for series in _get_update_ratios(record):
        steps, values = thin(series)
        is_high = np.interp(steps, rate_steps, rates) >= HIGH_RATE * rates.max()
        if is_high.any():
            ratios.append(float(np.median(values[is_high])))
    if not ratios:
        raise NotRecorded("no update-to-weight ratios at high learning rate")
    return float(np.median(ratios))


def get_highest_update_ratio(record: RunRecord) -> float:
    """Return the highest value over the logged steps of the median update-to-weight ratio of the modules."""
    by_step: dict[float, list[float]] = {}
    for series in _get_update_ratios(record):
        for step, value in zip(*thin(series), strict=True):
            by_step.setdefault(float(step), []).append(float(value))
    return max(float(np.median(values)) for values in by_step.values())


def explain_missing_modules(record: RunRecord) -> str:
    """Return why there are no statistics of modules, to be appended to what is missing."""
    is_logged = record.get("logging.modules") is True
    return ": modules.jsonl has none that can be read" if is_logged else "; set logging.modules=true"


def _get_update_ratios(record: RunRecord) -> list[Series]:
    """Return the series of all modules except a layer over n-grams. Raise NotRecorded without statistics of modules.

    The weights over n-grams start at 0, so that after n steps an update is about 1 / n of them at any learning rate.
    """
    recorded = record.modules.series.get("update_ratio", {})
    modules = {name: series for name, series in recorded.items() if name.rpartition(".")[2] != NGRAM_MODULE}
    if not modules:
        raise NotRecorded(f"no update-to-weight ratios{explain_missing_modules(record)}")
    return list(modules.values())
