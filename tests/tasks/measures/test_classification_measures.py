"""The measures of classifiers are those of scikit-learn, and what the data cannot say is left out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.core.noise import numpy_generator
from bottega.tasks.measures.classification import (
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


def single(seed: int, n: int, k: int, *, absent: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities in steps of a tenth before they are made to add up to 1, so that there are ties."""
    draw = numpy_generator(seed, "single", n, k)
    raw = np.round(draw.random((n, k)), 1) + 0.1
    labels = draw.integers(0, k - 1 if absent and k > 2 else k, n)
    return raw / raw.sum(1, keepdims=True), labels


def several(seed: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    draw = numpy_generator(seed, "several", n, k)
    return np.round(draw.random((n, k)), 1), (draw.random((n, k)) < 0.3).astype(np.float32)


@given(sizes)
def test_one_label_is_measured_as_scikit_learn_does(size: tuple[int, int, int]) -> None:
    probabilities, labels = single(*size)
    predicted, k = decide_labels(probabilities, multi_label=False), size[2]
    matrix = confusion_matrix(labels, predicted, k)
    np.testing.assert_array_equal(matrix, metrics.confusion_matrix(labels, predicted, labels=range(k)))
    found = per_class_metrics(matrix)
    theirs = metrics.precision_recall_fscore_support(labels, predicted, labels=range(k), zero_division=0)
    for ours, wanted in zip(found, theirs, strict=False):
        np.testing.assert_allclose(ours, wanted, atol=1e-12)
    means = average_metrics(found)
    assert sorted(means) == sorted(AVERAGES)
    for mean in ("macro", "weighted", "micro"):
        wanted = metrics.precision_recall_fscore_support(labels, predicted, average=mean, zero_division=0)
        assert [means[f"{mean}_{name}"] for name in ("precision", "recall", "f1")] == pytest.approx(wanted[:3])


@given(sizes)
def test_several_labels_are_measured_as_scikit_learn_does(size: tuple[int, int, int]) -> None:
    probabilities, labels = several(*size)
    predicted = decide_labels(probabilities, multi_label=True)
    matrices = confusion_matrices(labels, predicted)
    np.testing.assert_array_equal(matrices, metrics.multilabel_confusion_matrix(labels, predicted))
    found = per_class_metrics(matrices)
    theirs = metrics.precision_recall_fscore_support(labels, predicted, zero_division=0)
    for ours, wanted in zip(found, theirs, strict=False):
        np.testing.assert_allclose(ours, wanted, atol=1e-12)
    means = average_metrics(found)
    if labels.any():
        seen = (labels.any(0)) | (predicted.any(0))
        for mean in ("macro", "weighted", "micro"):
            wanted = metrics.f1_score(labels[:, seen], predicted[:, seen], average=mean, zero_division=0)
            assert means[f"{mean}_f1"] == pytest.approx(wanted)
    else:
        assert not any(name.startswith("weighted") for name in means), "nothing to weigh by"


@given(sizes)
def test_ranks_are_measured_as_scikit_learn_does_ties_included(size: tuple[int, int, int]) -> None:
    for probabilities, labels in (single(*size), several(*size)):
        is_of = labels > 0 if labels.ndim == 2 else labels[:, None] == np.arange(size[2])
        each = class_auroc(probabilities, labels)
        for k in range(size[2]):
            if 0 < is_of[:, k].sum() < len(is_of):
                assert each[k] == pytest.approx(metrics.roc_auc_score(is_of[:, k], probabilities[:, k]))
            else:
                assert math.isnan(each[k])


def test_the_mean_over_classes_is_that_of_scikit_learn_where_all_are_there() -> None:
    for k in (3, 4, 5):
        probabilities, labels = single(k, 200, k, absent=False)
        wanted = metrics.roc_auc_score(labels, probabilities, multi_class="ovr", average="macro")
        assert macro_auroc(probabilities, labels) == pytest.approx(wanted)
        chances, truths = several(k, 200, k)
        assert macro_auroc(chances, truths) == pytest.approx(metrics.roc_auc_score(truths, chances, average="macro"))
    probabilities, labels = single(2, 200, 2)
    assert macro_auroc(probabilities, labels) == pytest.approx(metrics.roc_auc_score(labels, probabilities[:, 1]))


def test_absent_classes_are_left_out_of_the_mean() -> None:
    probabilities, labels = single(0, 100, 4)
    assert not (labels == 3).any()
    assert macro_auroc(probabilities, labels) == pytest.approx(np.nanmean(class_auroc(probabilities, labels)[:3]))
    # Of class 3 there is no example; without its column nothing is left to take for it either.
    narrow = confusion_matrix(labels, probabilities[:, :3].argmax(1), 3)
    wide = confusion_matrix(labels, probabilities[:, :3].argmax(1), 4)
    assert average_metrics(per_class_metrics(wide)) == pytest.approx(average_metrics(per_class_metrics(narrow)))


@given(st.integers(0, 1000), st.integers(2, 40))
def test_equal_scores_are_half_a_win(seed: int, n: int) -> None:
    draw = numpy_generator(seed, "ties", n)
    scores, positive = draw.integers(0, 3, n), np.arange(n) % 2 == 0
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive] for b in scores[~positive]]
    assert auroc(scores, positive) == pytest.approx(np.mean(pairs))
    assert auroc(-scores, positive) == pytest.approx(1 - np.mean(pairs))


def test_calibration_by_hand() -> None:
    """Ten decisions at 0.8 of which 6 are right, ten at 0.6 of which 6 are: half of |0.6 - 0.8|, and half of nothing."""
    sure = np.repeat([0.8, 0.6], 10)
    probabilities = np.stack([sure, 1 - sure], 1)
    labels = np.tile([0] * 6 + [1] * 4, 2)
    assert expected_calibration_error(probabilities, labels) == pytest.approx(0.1)
    found = reliability_bins(sure, labels == 0)
    assert found.counts.tolist() == [0] * 8 + [10, 0, 0, 10] + [0] * 3
    assert (found.confidence[11], found.accuracy[11]) == (pytest.approx(0.8), 0.6)
    assert np.isnan(found.accuracy[0])
    assert len(found.edges) == 16


@given(sizes, st.integers(1, 20))
def test_calibration_is_the_weighted_gap_of_the_bins(size: tuple[int, int, int], bins: int) -> None:
    for probabilities, labels in (single(*size), several(*size)):
        is_several = labels.ndim == 2
        chosen = decide_labels(probabilities, multi_label=is_several)
        sure = np.where(chosen, probabilities, 1 - probabilities).ravel() if is_several else probabilities.max(1)
        right = (chosen == labels).ravel()
        edges, total = np.linspace(0, 1, bins + 1), 0.0
        for low, high in itertools.pairwise(edges):
            inside = (sure > low) & (sure <= high)
            if inside.any():
                total += inside.mean() * abs(right[inside].mean() - sure[inside].mean())
        assert expected_calibration_error(probabilities, labels, bins=bins) == pytest.approx(total, abs=1e-12)


def test_predictions_that_know_how_sure_they_are_have_no_error() -> None:
    draw = numpy_generator(0, "calibrated")
    positive = draw.random(100_000)
    labels = (draw.random(100_000) < positive).astype(np.int64)
    assert expected_calibration_error(np.stack([1 - positive, positive], 1), labels) < 0.01
    assert expected_calibration_error(np.stack([positive**3, 1 - positive**3], 1), 1 - labels) > 0.1


def test_the_score_says_what_the_data_can() -> None:
    probabilities, labels = single(0, 50, 3, absent=False)
    assert sorted(classification_metrics(probabilities, labels)) == ["auroc", "ece", "macro_f1", "weighted_f1"]
    assert sorted(classification_metrics(*several(0, 50, 3))) == ["auroc", "ece", "macro_f1", "weighted_f1"]
    assert sorted(classification_metrics(probabilities, np.zeros(50, int))) == ["ece", "macro_f1", "weighted_f1"], (
        "one class ranks nothing"
    )
    assert classification_metrics(probabilities[:0], labels[:0]) == {}
    nothing = classification_metrics(np.zeros((4, 2)), np.zeros((4, 2)))
    assert nothing == {"ece": 0.0}, "no label was there or told"


def test_a_model_that_diverged_is_neither_calibrated_nor_ranked() -> None:
    probabilities, labels = single(0, 50, 3)
    assert sorted(classification_metrics(np.full_like(probabilities, np.nan), labels)) == ["macro_f1", "weighted_f1"]


def test_a_perfect_classifier_has_one_of_everything() -> None:
    labels = np.arange(12) % 3
    found = classification_metrics(np.eye(3)[labels], labels)
    assert found == {"macro_f1": 1.0, "weighted_f1": 1.0, "ece": 0.0, "auroc": 1.0}
