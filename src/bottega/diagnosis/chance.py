"""Rule about a metric that does not exceed that of a guess."""

from __future__ import annotations

import math

import numpy as np

from bottega.diagnosis.curves import UNDERFITTED_FRACTION
from bottega.diagnosis.finding import Finding, NotRecorded
from bottega.diagnosis.overrides import (
    get_peak_rate,
    get_safe_rate,
    list_strong_regularisation,
    suggest_capacity,
    suggest_lower_rate,
)
from bottega.diagnosis.series import get_metric, get_task, require_data, require_finished
from bottega.run_files.record import RunRecord

NUM_STANDARD_ERRORS = 2.0
"""Standard errors of the validation accuracy above chance from which it counts as better."""
MAX_CHANCE_AUROC = 0.6
"""Area under the ROC curve below which a classifier ranks about as a guess does; the accuracy alone may be low because a few of
many classes are never predicted."""
NUM_LAST_EVALUATIONS = 3
"""Evaluations at the end whose median is judged."""


def find_metric_at_chance(record: RunRecord) -> Finding | None:
    """The validation accuracy is that of a guess."""
    require_finished(record)
    metric, chance = get_chance_level(record)
    steps, values = get_metric(record, "eval", metric, minimum=2)
    count = record.data.get("splits", {}).get("validation")
    if not isinstance(count, int) or count < 1:
        raise NotRecorded("the number of validation examples; data.json has none")
    last = values[-NUM_LAST_EVALUATIONS:]
    value = float(np.median(last))
    noise = math.sqrt(chance * (1 - chance) / count)
    if chance + NUM_STANDARD_ERRORS * noise >= 1:
        raise NotRecorded(f"guessing gives {chance:.3f}, and {count:,} validation samples cannot tell more from it")
    if value > chance + NUM_STANDARD_ERRORS * noise:
        return None
    auroc = record.log.get("eval", "auroc")
    if auroc is not None and float(np.median(auroc.values[-NUM_LAST_EVALUATIONS:])) > MAX_CHANCE_AUROC:
        return None
    return Finding(
        "metric-at-chance",
        f"validation {metric} is {value:.3f}, and guessing gives {chance:.3f}; the standard error of {count:,} examples is "
        f"{noise:.3f}",
        (int(steps[-len(last)]), int(steps[-1])),
        suggest_against_chance(record),
    )


def get_chance_level(record: RunRecord) -> tuple[str, float]:
    """Return the accuracy of a run and its value for a guess. Raise NotRecorded for tasks without one."""
    task = get_task(record)
    require_data(record)
    if task in ("classify", "routing") and not record.get("data.multi_label"):
        counts = _count_classes(record)
        if sum(counts) > 0:
            return "accuracy", max(counts) / sum(counts)
    if task == "recall" and isinstance(count := record.get("data.num_values"), int):
        return "retrieval_accuracy", 1 / count
    if task == "align" and isinstance(count := record.get("model.negatives"), int):
        return "accuracy", 1 / (count + 1)
    raise NotRecorded(f"{task} has no metric whose value for a guess is known")


def _count_classes(record: RunRecord) -> list[int]:
    """Return the number of samples of each class: of the validation data if it was counted there, else of the training data."""
    per_class = record.evaluation.get("per_class")
    if isinstance(per_class, dict) and sum(counts := [int(row["support"]) for row in per_class.values()]) > 0:
        return counts
    return [count for count in record.data.get("classes", {}).values() if isinstance(count, int)]


def suggest_against_chance(record: RunRecord) -> str:
    """Return an override for the likeliest cause, which depends on whether the training data was learned."""
    losses = get_metric(record, "train", "loss")[1]
    if np.median(losses[-len(losses) // 4 :]) > UNDERFITTED_FRACTION * losses[:3].max():
        is_high = get_peak_rate(record) > get_safe_rate(record) and not list_strong_regularisation(record)
        return suggest_lower_rate(record) if is_high else suggest_capacity(record)
    # The training data was memorised, and nothing of it applies to the validation data.
    if record.get("task") == "classify" and record.get("data.split.by") == "hash":
        return "data.split.by=stratified"
    if record.get("data.limit") is not None:
        return "data.limit=null"
    if isinstance(count := record.get("data.num_samples"), int):
        return f"data.num_samples={4 * count}"
    return f"data.split.seed={int(record.get('data.split.seed') or 0) + 1}"


RULES = {"metric-at-chance": find_metric_at_chance}
