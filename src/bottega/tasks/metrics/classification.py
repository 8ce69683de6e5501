"""Classification metrics in NumPy: confusion matrices, F1, calibration and AUROC.

n examples, K classes. Single label: `labels` (n,) are class indices and `probabilities` (n, K) sum to 1. Multi-label: `labels`
(n, K) are 0 or 1, and `probabilities` (n, K) are independent of each other.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

NUM_BINS = 15
"""Bins of equal width from 0 to 1, as in Guo et al. (2017)."""
THRESHOLD = 0.5
"""Multi-label: a class is predicted from this probability on."""


class PerClass(NamedTuple):
    """Metrics of each class, (K,) each; 0 where they are undefined, as `support` and `predicted` show."""

    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    support: np.ndarray
    """Number of examples of the class."""
    predicted: np.ndarray
    """Number of predictions of the class."""


class Reliability(NamedTuple):
    """Bins of a reliability diagram, (bins,) each; NaN where a bin is empty."""

    edges: np.ndarray
    """(bins + 1,)"""
    counts: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, num_labels: int) -> np.ndarray:
    """Return counts (K, K): rows are labels, columns are predictions."""
    labels, predicted = np.asarray(labels, np.int64), np.asarray(predicted, np.int64)
    assert labels.shape == predicted.shape, "one prediction for each example"
    flat = np.bincount(labels * num_labels + predicted, minlength=num_labels**2)
    return flat.reshape(num_labels, num_labels)


def confusion_matrices(labels: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Return [[true negative, false positive], [false negative, true positive]] of each class, (K, 2, 2)."""
    labels, predicted = np.asarray(labels) > 0, np.asarray(predicted) > 0
    rows = [[~labels & ~predicted, ~labels & predicted], [labels & ~predicted, labels & predicted]]
    return np.array([[cell.sum(0) for cell in row] for row in rows]).transpose(2, 0, 1)


def decide_labels(probabilities: np.ndarray, *, multi_label: bool) -> np.ndarray:
    """Return the most likely class (n,); with `multi_label` (n, K), whether each class is predicted."""
    return probabilities >= THRESHOLD if multi_label else probabilities.argmax(1)


def per_class_metrics(matrix: np.ndarray) -> PerClass:
    """Return precision, recall and F1 of each class from a confusion matrix (K, K), or from (K, 2, 2)."""
    if matrix.ndim == 3:
        num_correct, support, predicted = matrix[:, 1, 1], matrix[:, 1].sum(1), matrix[:, :, 1].sum(1)
    else:
        num_correct, support, predicted = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    f1 = _divide(2 * num_correct, support + predicted)
    return PerClass(_divide(num_correct, predicted), _divide(num_correct, support), f1, support, predicted)


def average_metrics(metrics: PerClass) -> dict[str, float]:
    """Return macro averages (classes equally), weighted ones (by support) and micro averages (all decisions equally).

    Classes with neither examples nor predictions are left out.
    """
    is_counted = (metrics.support + metrics.predicted) > 0
    if not is_counted.any():
        return {}
    result = {
        f"macro_{name}": float(getattr(metrics, name)[is_counted].mean()) for name in ("precision", "recall", "f1")
    }
    support, predicted = metrics.support.sum(), metrics.predicted.sum()
    num_correct = float((metrics.recall * metrics.support).sum())
    if support:
        for name in ("precision", "recall", "f1"):
            result[f"weighted_{name}"] = float((getattr(metrics, name) * metrics.support).sum() / support)
    micro = {
        "precision": (num_correct, predicted),
        "recall": (num_correct, support),
        "f1": (2 * num_correct, support + predicted),
    }
    return result | {f"micro_{name}": float(a / b) if b else 0.0 for name, (a, b) in micro.items()}


def reliability_bins(confidence: np.ndarray, is_correct: np.ndarray, *, num_bins: int = NUM_BINS) -> Reliability:
    """Return decisions binned by confidence into `num_bins` bins of equal width; a bin includes its upper edge."""
    confidence, is_correct = np.asarray(confidence, np.float64).ravel(), np.asarray(is_correct).ravel()
    edges = np.linspace(0.0, 1.0, num_bins + 1)
    bin_index = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, num_bins - 1)
    counts = np.bincount(bin_index, minlength=num_bins)
    with np.errstate(invalid="ignore"):
        means = [
            np.bincount(bin_index, weights=values, minlength=num_bins) / counts for values in (confidence, is_correct)
        ]
    return Reliability(edges, counts, *means)


def compute_confidences(probabilities: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the confidence of each decision and whether it is correct: (n,), or (n, K) for multi-label."""
    if labels.ndim == 2:
        is_predicted = decide_labels(probabilities, multi_label=True)
        return np.where(is_predicted, probabilities, 1 - probabilities), is_predicted == (labels > 0)
    return probabilities.max(1), probabilities.argmax(1) == labels


def expected_calibration_error(probabilities: np.ndarray, labels: np.ndarray, *, num_bins: int = NUM_BINS) -> float:
    """Return the mean of |accuracy - confidence| over bins, weighted by their counts (Naeini et al., 2015).

    The confidence is that of the most likely class; for multi-label, of each binary decision.
    """
    reliability = reliability_bins(*compute_confidences(probabilities, labels), num_bins=num_bins)
    has_decisions = reliability.counts > 0
    if not has_decisions.any() or not np.isfinite(probabilities).all():
        return math.nan
    gaps = np.abs(reliability.accuracy - reliability.confidence)[has_decisions]
    return float((reliability.counts[has_decisions] * gaps).sum() / reliability.counts.sum())


def auroc(scores: np.ndarray, is_positive: np.ndarray) -> float:
    """Return the probability that a positive example scores above a negative one; ties count half (Mann and Whitney, 1947).

    NaN without positive or without negative examples.
    """
    scores, is_positive = np.asarray(scores), np.asarray(is_positive).astype(bool)
    num_positive, num_negative = int(is_positive.sum()), int((~is_positive).sum())
    if not num_positive or not num_negative or not np.isfinite(scores).all():
        return math.nan
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    last_ranks = np.cumsum(counts)
    ranks = (last_ranks - (counts - 1) / 2)[inverse]  # equal scores share the mean of their ranks
    num_above = ranks[is_positive].sum() - num_positive * (num_positive + 1) / 2
    return float(num_above / (num_positive * num_negative))


def class_auroc(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the AUROC of each class against all others, (K,); NaN where it is undefined."""
    is_member = labels > 0 if labels.ndim == 2 else labels[:, None] == np.arange(probabilities.shape[1])
    return np.array([auroc(scores, truth) for scores, truth in zip(probabilities.T, is_member.T, strict=True)])


def macro_auroc(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Return the AUROC of the second of two classes, or the mean over more classes of each against all others.

    Classes that no example has, or that every example has, are left out.
    """
    if labels.ndim == 1 and probabilities.shape[1] == 2:
        return auroc(probabilities[:, 1], labels == 1)
    scores = class_auroc(probabilities, labels)
    scores = scores[~np.isnan(scores)]
    return float(scores.mean()) if len(scores) else math.nan


def classification_metrics(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return macro and weighted F1, ECE and AUROC, which are not means over examples; undefined ones are left out."""
    if not len(labels):
        return {}
    multi_label = labels.ndim == 2
    predicted = decide_labels(probabilities, multi_label=multi_label)
    if multi_label:
        matrix = confusion_matrices(labels, predicted)
    else:
        matrix = confusion_matrix(labels, predicted, probabilities.shape[1])
    means = average_metrics(per_class_metrics(matrix))
    metrics = {name: means.get(name, math.nan) for name in ("macro_f1", "weighted_f1")}
    metrics["ece"] = expected_calibration_error(probabilities, labels)
    metrics["auroc"] = macro_auroc(probabilities, labels)
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Return the quotient, 0 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.zeros(len(denominator)), where=denominator > 0)
