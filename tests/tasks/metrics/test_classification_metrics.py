"""Classification metrics match scikit-learn, and undefined ones are left out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.core.noise import numpy_generator
from bottega.tasks.metrics.classification import (
    auroc,
    average_metrics,
    class_auroc,
    classification_metrics,
    confusion_matrices,
    confusion_matrix,
    decide_labels,
    expected_calibration_error,
    macro_auroc,
    per_class_metrics,
    reliability_bins,
)

metrics = pytest.importorskip("sklearn.metrics")

sizes = st.tuples(st.integers(0, 1000), st.integers(1, 60), st.integers(2, 5))
AVERAGES = [f"{mean}_{name}" for mean in ("macro", "weighted", "micro") for name in ("precision", "recall", "f1")]


def draw_single_label(seed: int, n: int, k: int, *, absent: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return normalised probabilities, rounded to a tenth beforehand to have ties, and labels."""
    rng = numpy_generator(seed, "single", n, k)
    raw = np.round(rng.random((n, k)), 1) + 0.1
    labels = rng.integers(0, k - 1 if absent and k > 2 else k, n)
    return raw / raw.sum(1, keepdims=True), labels


def draw_multi_label(seed: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    rng = numpy_generator(seed, "several", n, k)
    return np.round(rng.random((n, k)), 1), (rng.random((n, k)) < 0.3).astype(np.float32)


@given(sizes)
def test_single_label_metrics_match_scikit_learn(size: tuple[int, int, int]) -> None:
    probabilities, labels = draw_single_label(*size)
    predicted, k = decide_labels(probabilities, multi_label=False), size[2]
    matrix = confusion_matrix(labels, predicted, k)
    np.testing.assert_array_equal(matrix, metrics.confusion_matrix(labels, predicted, labels=range(k)))
    result = per_class_metrics(matrix)
    theirs = metrics.precision_recall_fscore_support(labels, predicted, labels=range(k), zero_division=0)
    for ours, expected in zip(result, theirs, strict=False):
        np.testing.assert_allclose(ours, expected, atol=1e-12)
    means = average_metrics(result)
    assert sorted(means) == sorted(AVERAGES)
    for mean in ("macro", "weighted", "micro"):
        expected = metrics.precision_recall_fscore_support(labels, predicted, average=mean, zero_division=0)
        assert [means[f"{mean}_{name}"] for name in ("precision", "recall", "f1")] == pytest.approx(expected[:3])


@given(sizes)
def test_multi_label_metrics_match_scikit_learn(size: tuple[int, int, int]) -> None:
    probabilities, labels = draw_multi_label(*size)
    predicted = decide_labels(probabilities, multi_label=True)
    matrices = confusion_matrices(labels, predicted)
    np.testing.assert_array_equal(matrices, metrics.multilabel_confusion_matrix(labels, predicted))
    result = per_class_metrics(matrices)
    theirs = metrics.precision_recall_fscore_support(labels, predicted, zero_division=0)
    for ours, expected in zip(result, theirs, strict=False):
        np.testing.assert_allclose(ours, expected, atol=1e-12)
    means = average_metrics(result)
    if labels.any():
        is_present = (labels.any(0)) | (predicted.any(0))
        for mean in ("macro", "weighted", "micro"):
            expected = metrics.f1_score(labels[:, is_present], predicted[:, is_present], average=mean, zero_division=0)
            assert means[f"{mean}_f1"] == pytest.approx(expected)
    else:
        assert not any(name.startswith("weighted") for name in means), "there are no weights without labels"


@given(sizes)
def test_auroc_matches_scikit_learn_including_ties(size: tuple[int, int, int]) -> None:
    for probabilities, labels in (draw_single_label(*size), draw_multi_label(*size)):
        is_positive = labels > 0 if labels.ndim == 2 else labels[:, None] == np.arange(size[2])
        aurocs = class_auroc(probabilities, labels)
        for k in range(size[2]):
            if 0 < is_positive[:, k].sum() < len(is_positive):
                assert aurocs[k] == pytest.approx(metrics.roc_auc_score(is_positive[:, k], probabilities[:, k]))
            else:
                assert math.isnan(aurocs[k])


def test_macro_auroc_matches_scikit_learn_if_all_classes_are_present() -> None:
    for k in (3, 4, 5):
        probabilities, labels = draw_single_label(k, 200, k, absent=False)
        expected = metrics.roc_auc_score(labels, probabilities, multi_class="ovr", average="macro")
        assert macro_auroc(probabilities, labels) == pytest.approx(expected)
        multi_probabilities, multi_labels = draw_multi_label(k, 200, k)
        assert macro_auroc(multi_probabilities, multi_labels) == pytest.approx(
            metrics.roc_auc_score(multi_labels, multi_probabilities, average="macro")
        )
    probabilities, labels = draw_single_label(2, 200, 2)
    assert macro_auroc(probabilities, labels) == pytest.approx(metrics.roc_auc_score(labels, probabilities[:, 1]))


def test_absent_classes_are_left_out_of_the_mean() -> None:
    probabilities, labels = draw_single_label(0, 100, 4)
    assert not (labels == 3).any()
    assert macro_auroc(probabilities, labels) == pytest.approx(np.nanmean(class_auroc(probabilities, labels)[:3]))
    # Class 3 has no example; without its column it is not predicted either.
    narrow = confusion_matrix(labels, probabilities[:, :3].argmax(1), 3)
    wide = confusion_matrix(labels, probabilities[:, :3].argmax(1), 4)
    assert average_metrics(per_class_metrics(wide)) == pytest.approx(average_metrics(per_class_metrics(narrow)))


@given(st.integers(0, 1000), st.integers(2, 40))
def test_ties_count_one_half(seed: int, n: int) -> None:
    rng = numpy_generator(seed, "ties", n)
    scores, positive = rng.integers(0, 3, n), np.arange(n) % 2 == 0
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive] for b in scores[~positive]]
    assert auroc(scores, positive) == pytest.approx(np.mean(pairs))
    assert auroc(-scores, positive) == pytest.approx(1 - np.mean(pairs))


def test_calibration_error_of_two_bins() -> None:
    """Ten predictions at 0.8 with 6 correct, ten at 0.6 with 6 correct: half of |0.6 - 0.8|, plus half of 0."""
    confidence = np.repeat([0.8, 0.6], 10)
    probabilities = np.stack([confidence, 1 - confidence], 1)
    labels = np.tile([0] * 6 + [1] * 4, 2)
    assert expected_calibration_error(probabilities, labels) == pytest.approx(0.1)
    result = reliability_bins(confidence, labels == 0)
    assert result.counts.tolist() == [0] * 8 + [10, 0, 0, 10] + [0] * 3
    assert (result.confidence[11], result.accuracy[11]) == (pytest.approx(0.8), 0.6)
    assert np.isnan(result.accuracy[0])
    assert len(result.edges) == 16


@given(sizes, st.integers(1, 20))
def test_calibration_is_the_weighted_gap_of_the_bins(size: tuple[int, int, int], bins: int) -> None:
    for probabilities, labels in (draw_single_label(*size), draw_multi_label(*size)):
        multi_label = labels.ndim == 2
        chosen = decide_labels(probabilities, multi_label=multi_label)
        confidence = np.where(chosen, probabilities, 1 - probabilities).ravel() if multi_label else probabilities.max(1)
        correct = (chosen == labels).ravel()
        edges, total = np.linspace(0, 1, bins + 1), 0.0
        for low, high in itertools.pairwise(edges):
            inside = (confidence > low) & (confidence <= high)
            if inside.any():
                total += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
        assert expected_calibration_error(probabilities, labels, num_bins=bins) == pytest.approx(total, abs=1e-12)


def test_calibrated_predictions_have_no_calibration_error() -> None:
    rng = numpy_generator(0, "calibrated")
    positive = rng.random(100_000)
    labels = (rng.random(100_000) < positive).astype(np.int64)
    assert expected_calibration_error(np.stack([1 - positive, positive], 1), labels) < 0.01
    assert expected_calibration_error(np.stack([positive**3, 1 - positive**3], 1), 1 - labels) > 0.1


def test_undefined_metrics_are_left_out() -> None:
    probabilities, labels = draw_single_label(0, 50, 3, absent=False)
    assert sorted(classification_metrics(probabilities, labels)) == ["auroc", "ece", "macro_f1", "weighted_f1"]
    assert sorted(classification_metrics(*draw_multi_label(0, 50, 3))) == ["auroc", "ece", "macro_f1", "weighted_f1"]
    assert sorted(classification_metrics(probabilities, np.zeros(50, int))) == ["ece", "macro_f1", "weighted_f1"], (
        "AUROC needs two classes"
    )
    assert classification_metrics(probabilities[:0], labels[:0]) == {}
    without_labels = classification_metrics(np.zeros((4, 2)), np.zeros((4, 2)))
    assert without_labels == {"ece": 0.0}, "no label is present or predicted"


def test_nan_probabilities_have_no_ece_or_auroc() -> None:
    probabilities, labels = draw_single_label(0, 50, 3)
    assert sorted(classification_metrics(np.full_like(probabilities, np.nan), labels)) == ["macro_f1", "weighted_f1"]


def test_a_perfect_classifier_has_perfect_metrics() -> None:
    labels = np.arange(12) % 3
    result = classification_metrics(np.eye(3)[labels], labels)
    assert result == {"macro_f1": 1.0, "weighted_f1": 1.0, "ece": 0.0, "auroc": 1.0}
