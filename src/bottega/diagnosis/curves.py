"""Rules about loss curves: overfitting, underfitting, plateau and slow convergence."""

from __future__ import annotations

import math

import numpy as np

from bottega.config.metrics import infer_metric_mode
from bottega.diagnosis.finding import Finding, NotRecorded
from bottega.diagnosis.overrides import (
    get_update_ratio_or_default,
    list_strong_regularisation,
    suggest_capacity,
    suggest_decay,
    suggest_faster_training,
    suggest_shorter_run,
)
from bottega.diagnosis.series import (
    CONVERGED_FRACTION,
    TrainingCurve,
    get_metric,
    get_task,
    get_training_curve,
    require_finished,
)
from bottega.run_files.record import RunRecord

MIN_OVERFITTING_RISE = 0.1
"""Rise of the validation loss above its minimum, as a fraction of it, that counts; healthy runs stay below 0.09."""
MIN_RISE_AT_EQUAL_METRIC = 0.25
"""The same if the metric of the recipe, such as accuracy, has not become worse: the model is then only overconfident.
Healthy runs have up to 0.21."""
MIN_RISE_OF_START = 0.01
"""The same, as a fraction of the first training loss: from 0.002 to 0.004 is noise of a model that has learned its task."""
FLAT_FRACTION = 0.03
"""Fall of the training loss over the second half of a run, as a fraction of its start, below which it is flat."""
UNDERFITTED_FRACTION = 0.5
"""Final training loss, as a fraction of its start, above which a model has fitted little of its training data."""
MAX_GAP = 1.1
"""Ratio of validation to training loss below which there is no gap: the model has memorised nothing."""
SLOW_SHARE, SLOW_SHARE_WHEN_DECAYED = 0.12, 0.3
"""Share of the whole fall of the training loss in the last quarter of a run from which it was still falling. The loss also falls
while a rate decays: healthy runs with a completed decay have up to 0.23, a straight line has 0.29."""
MIN_TOTAL_UPDATE = 0.5
"""Steps times update-to-weight ratio below which the weights had little chance to leave their initial values."""
ZERO_LOSS_TASKS = ("classify", "routing", "recall", "align")
"""Tasks whose training loss a large enough model can bring to about zero, so that a high one means underfitting."""


def find_overfitting(record: RunRecord) -> Finding | None:
    """The validation loss rises while the training loss still falls."""
    steps, losses = get_metric(record, "eval", "loss", minimum=4)
    curve = get_training_curve(record, minimum=4)
    best = int(np.argmin(losses))
    rise = min(losses[-1], np.median(losses[best + 1 :])) - losses[best] if best < len(losses) - 1 else 0.0
    limit = MIN_OVERFITTING_RISE if _is_metric_worse(record, float(steps[best])) else MIN_RISE_AT_EQUAL_METRIC
    if rise <= 0 or rise < max(limit * abs(losses[best]), MIN_RISE_OF_START * abs(curve.start)):
        return None
    before = curve.losses[curve.steps <= steps[best]][-5:]
    after = curve.losses[-5:]
    if not len(before) or np.median(after) >= np.median(before):
        return None
    return Finding(
        "overfitting",
        f"the validation loss rose from {losses[best]:.4g} to {losses[-1]:.4g} while the training loss fell from "
        f"{np.median(before):.4g} to {np.median(after):.4g}",
        (int(steps[best]), int(steps[-1])),
        suggest_shorter_run(record, int(steps[best])),
    )


def _is_metric_worse(record: RunRecord, best_step: float) -> bool:
    """Return whether the recipe's metric ended worse than at `best_step`, by more than the noise of its validation set.

    True if lower is better, as for the loss and its functions, such as perplexity: the rise of the loss is then judged alone.
    """
    name = record.get("evaluation.metric") or "loss"
    series = record.log.get("eval", name)
    if series is None:
        return True
    steps, values = np.array(series.steps), np.array(series.values)
    if (record.get("evaluation.mode") or infer_metric_mode(name)) != "max":
        return True
    before, after = float(values[steps <= best_step].max(initial=values[0])), float(values[-1])
    count = record.data.get("splits", {}).get("validation")
    is_fraction = values.min() >= 0 and values.max() <= 1 and isinstance(count, int) and count > 0
    noise = math.sqrt(max(before * (1 - before), 0.0) / count) if is_fraction else 0.0
    return after < before - noise


def find_underfitting(record: RunRecord) -> Finding | None:
    """The training loss is flat and high, and the validation loss is not higher."""
    if (task := get_task(record)) not in ZERO_LOSS_TASKS:
        raise NotRecorded(f"the minimum of the loss of {task} is not known")
    curve = get_training_curve(record)
    losses = get_metric(record, "eval", "loss", minimum=2)[1]
    if curve.end < UNDERFITTED_FRACTION * curve.start or not curve.is_flat(FLAT_FRACTION):
        return None
    if losses[-1] > MAX_GAP * curve.end:
        return None
    if get_update_ratio_or_default(record) * curve.steps[-1] < MIN_TOTAL_UPDATE:
        return None  # it was trained too little to say what it can fit
    if not curve.is_decayed and not list_strong_regularisation(record):
        return None  # a plateau: the rate comes first
    return Finding(
        "underfitting",
        f"the training loss stayed at {curve.end:.4g} after {curve.start:.4g} at the start, and the validation loss, "
        f"{losses[-1]:.4g}, is not higher",
        _get_second_half(curve),
        suggest_capacity(record),
    )


def find_plateau(record: RunRecord) -> Finding | None:
    """Training and validation loss stopped falling long before the end, with the learning rate still high."""
    require_finished(record)
    curve = get_training_curve(record)
    steps, losses = get_metric(record, "eval", "loss", minimum=4)
    if curve.is_decayed or list_strong_regularisation(record):
        return None
    if curve.end < CONVERGED_FRACTION * curve.start or not curve.is_flat(FLAT_FRACTION):
        return None
    is_second_half = steps > (curve.steps[0] + curve.steps[-1]) / 2
    first_half, second_half = losses[~is_second_half], losses[is_second_half]
    if not len(first_half) or not len(second_half):
        return None
    if first_half.min() - second_half.min() > FLAT_FRACTION * abs(curve.start):
        return None
    return Finding(
        "plateau",
        f"over the second half the training loss went from {curve.quarters[1]:.4g} to {curve.end:.4g} and the best validation "
        f"loss from {first_half.min():.4g} to {second_half.min():.4g}, with the learning rate at {100 * curve.final_rate:.0f} % "
        "of its peak",
        _get_second_half(curve),
        suggest_decay(record),
    )


def find_slow_convergence(record: RunRecord) -> Finding | None:
    """The loss was still falling steadily at the end of the run."""
    require_finished(record)
    curve = get_training_curve(record)
    steps, losses = get_metric(record, "eval", "loss", minimum=4)
    fall, last_fall = curve.start - curve.end, curve.quarters[2] - curve.quarters[3]
    share = SLOW_SHARE_WHEN_DECAYED if curve.is_decayed else SLOW_SHARE
    if fall <= 0 or curve.end < CONVERGED_FRACTION * curve.start or last_fall < share * fall:
        return None
    before = losses[steps <= curve.steps[3 * len(curve.steps) // 4]]
    if not len(before) or before.min() - losses[-1] < share * (losses[0] - losses[-1]):
        return None  # it falls on the training data alone
    return Finding(
        "slow-convergence",
        f"the training loss was still falling at the end, from {curve.quarters[2]:.4g} to {curve.end:.4g} in the last quarter, "
        f"{100 * last_fall / fall:.0f} % of its whole fall",
        (int(curve.steps[3 * len(curve.steps) // 4]), int(curve.steps[-1])),
        suggest_faster_training(record),
    )


def _get_second_half(curve: TrainingCurve) -> tuple[int, int]:
    return int(curve.steps[len(curve.steps) // 2]), int(curve.steps[-1])


RULES = {
    "overfitting": find_overfitting,
    "underfitting": find_underfitting,
    "plateau": find_plateau,
    "slow-convergence": find_slow_convergence,
}
