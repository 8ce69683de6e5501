"""Tables of a classifier's predictions for reports: metrics of each class, the confusion matrix, the calibration."""

from __future__ import annotations

from typing import Any

import numpy as np

from bottega.core.types import Rows
from bottega.tasks.metrics import classification

MAX_CONFUSION_CLASSES = 200
"""Classes up to which the confusion matrix is stored."""


def build_prediction_tables(rows: Rows, classes: tuple[str, ...]) -> dict[str, Any]:
    """Return `per_class`, `confusion` (single label only) and `calibration` as plain values; {} for rows without predictions.

    `per_class` is class -> precision, recall, f1 and support, its number of samples.
    """
    if "probability" not in rows:
        return {}
    probabilities, is_multi_label = rows["probability"], "labels" in rows
    labels = rows["labels" if is_multi_label else "label"]
    predicted = classification.decide_labels(probabilities, multi_label=is_multi_label)
    matrix = (
        classification.confusion_matrices(labels, predicted)
        if is_multi_label
        else classification.confusion_matrix(labels, predicted, len(classes))
    )
    bins = classification.reliability_bins(*classification.compute_confidences(probabilities, labels))
    calibration = {name: _to_list(values) for name, values in bins._asdict().items()}
    tables: dict[str, Any] = {"per_class": _list_class_metrics(matrix, classes), "calibration": calibration}
    if not is_multi_label and len(classes) <= MAX_CONFUSION_CLASSES:
        tables["confusion"] = {"classes": list(classes), "counts": matrix.tolist()}
    return tables


def _list_class_metrics(matrix: np.ndarray, classes: tuple[str, ...]) -> dict[str, dict[str, float]]:
    metrics = classification.per_class_metrics(matrix)
    return {
        name: {
            "precision": float(metrics.precision[i]),
            "recall": float(metrics.recall[i]),
            "f1": float(metrics.f1[i]),
            "support": int(metrics.support[i]),
        }
        for i, name in enumerate(classes)
    }


def _to_list(values: np.ndarray) -> list[float | None]:
    """Return plain numbers; NaN, for an empty bin, becomes None."""
    return [float(value) if np.isfinite(value) else None for value in values]
