"""How well classes are told, in numpy: what is confused with what, F1, calibration, and how well scores rank.

n examples   K classes. One class for each example: `labels` [n] are numbers of classes, `probabilities` [n, K] add up to 1.
Several: `labels` [n, K] are 0 or 1, and each of `probabilities` [n, K] is a question of its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

BINS = 15
"""Equal parts of 0 to 1, as in Guo et al. (2017)."""
THRESHOLD = 0.5
"""With several labels, a class is told from this probability on."""


class PerClass(NamedTuple):
    """[K] each. What nothing was counted for is 0, and `support` says so."""

    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    support: np.ndarray
    """How many examples are of the class."""
    predicted: np.ndarray
    """How many were taken for it."""


class Reliability(NamedTuple):
    """What the bars of a calibration plot are drawn from, [bins] each; NaN where a bin is empty."""

    edges: np.ndarray
    """[bins + 1]"""
    counts: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, num_labels: int) -> np.ndarray:
    """[K, K] counts: the row is what an example is, the column what it was taken for."""
    labels, predicted = np.asarray(labels, np.int64), np.asarray(predicted, np.int64)
    assert labels.shape == predicted.shape, "one prediction for each example"
    flat = np.bincount(labels * num_labels + predicted, minlength=num_labels**2)
    return flat.reshape(num_labels, num_labels)


def confusion_matrices(labels: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """[K, 2, 2] of several labels [n, K]: one for each class, [[true negative, false positive], [false negative, true]]."""
    labels, predicted = np.asarray(labels) > 0, np.asarray(predicted) > 0
    rows = [[~labels & ~predicted, ~labels & predicted], [labels & ~predicted, labels & predicted]]
    return np.array([[cell.sum(0) for cell in row] for row in rows]).transpose(2, 0, 1)


def decide_labels(probabilities: np.ndarray, *, multi_label: bool) -> np.ndarray:
    """[n] the likeliest class; with several labels [n, K], each that is at least as likely as not."""
    return probabilities >= THRESHOLD if multi_label else probabilities.argmax(1)


def per_class_metrics(matrix: np.ndarray) -> PerClass:
    """From a confusion matrix [K, K], or one [2, 2] for each class."""
    if matrix.ndim == 3:
        right, support, predicted = matrix[:, 1, 1], matrix[:, 1].sum(1), matrix[:, :, 1].sum(1)
    else:
        right, support, predicted = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    f1 = _ratio(2 * right, support + predicted)
    return PerClass(_ratio(right, predicted), _ratio(right, support), f1, support, predicted)


def average_metrics(found: PerClass) -> dict[str, float]:
    """macro: each class alike; weighted: by its examples; micro: all decisions alike.

    A class that no example is of and none was taken for says nothing, and is left out.
    """
    seen = (found.support + found.predicted) > 0
    if not seen.any():
        return {}
    result = {f"macro_{name}": float(getattr(found, name)[seen].mean()) for name in ("precision", "recall", "f1")}
    support, predicted = found.support.sum(), found.predicted.sum()
    right = float((found.recall * found.support).sum())
    if support:
        for name in ("precision", "recall", "f1"):
            result[f"weighted_{name}"] = float((getattr(found, name) * found.support).sum() / support)
    micro = {"precision": (right, predicted), "recall": (right, support), "f1": (2 * right, support + predicted)}
    return result | {f"micro_{name}": float(a / b) if b else 0.0 for name, (a, b) in micro.items()}


def reliability_bins(confidence: np.ndarray, is_right: np.ndarray, *, bins: int = BINS) -> Reliability:
    """Decisions sorted by how sure they were into `bins` of equal width; a bin holds its upper edge."""
    confidence, is_right = np.asarray(confidence, np.float64).ravel(), np.asarray(is_right).ravel()
    edges = np.linspace(0.0, 1.0, bins + 1)
    place = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        means = [np.bincount(place, weights=values, minlength=bins) / counts for values in (confidence, is_right)]
    return Reliability(edges, counts, *means)


def confidences(probabilities: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How sure each decision was, and whether it was right: [n], or [n, K] with several labels."""
    if labels.ndim == 2:
        chosen = decide_labels(probabilities, multi_label=True)
        return np.where(chosen, probabilities, 1 - probabilities), chosen == (labels > 0)
    return probabilities.max(1), probabilities.argmax(1) == labels


def expected_calibration_error(probabilities: np.ndarray, labels: np.ndarray, *, bins: int = BINS) -> float:
    """|accuracy - confidence| of 15 bins of equal width, by how many decisions fall in each (Naeini et al., 2015).

    The confidence is that of the likeliest class; with several labels, of each yes or no.
    """
    found = reliability_bins(*confidences(probabilities, labels), bins=bins)
    filled = found.counts > 0
    if not filled.any() or not np.isfinite(probabilities).all():
        return math.nan
    gaps = np.abs(found.accuracy - found.confidence)[filled]
    return float((found.counts[filled] * gaps).sum() / found.counts.sum())


def auroc(scores: np.ndarray, is_positive: np.ndarray) -> float:
    """The chance that a positive example scores above a negative one, where ties are half a win (Mann and Whitney, 1947).

    NaN where there are not both.
    """
    scores, is_positive = np.asarray(scores), np.asarray(is_positive).astype(bool)
    positives, negatives = int(is_positive.sum()), int((~is_positive).sum())
    if not positives or not negatives or not np.isfinite(scores).all():
        return math.nan
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2)[place]  # equal scores share the mean of their ranks
    above = ranks[is_positive].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def class_auroc(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """[K]: each class against all others; NaN where there are not both."""
    is_of = labels > 0 if labels.ndim == 2 else labels[:, None] == np.arange(probabilities.shape[1])
    return np.array([auroc(scores, truth) for scores, truth in zip(probabilities.T, is_of.T, strict=True)])


def macro_auroc(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Of two classes the second against the first, of more the mean of each against all others.

    Classes absent from the data, and those that every example is of, are left out.
    """
    if labels.ndim == 1 and probabilities.shape[1] == 2:
        return auroc(probabilities[:, 1], labels == 1)
    found = class_auroc(probabilities, labels)
    found = found[~np.isnan(found)]
    return float(found.mean()) if len(found) else math.nan


def classification_metrics(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """What is worth watching and no mean over examples; what the data cannot say is left out."""
    if not len(labels):
        return {}
    multi_label = labels.ndim == 2
    predicted = decide_labels(probabilities, multi_label=multi_label)
    if multi_label:
        matrix = confusion_matrices(labels, predicted)
    else:
        matrix = confusion_matrix(labels, predicted, probabilities.shape[1])
    means = average_metrics(per_class_metrics(matrix))
    found = {name: means.get(name, math.nan) for name in ("macro_f1", "weighted_f1")}
    found["ece"] = expected_calibration_error(probabilities, labels)
    found["auroc"] = macro_auroc(probabilities, labels)
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros(len(whole)), where=whole > 0)
