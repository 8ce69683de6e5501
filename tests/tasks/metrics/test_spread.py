"""Diversity metrics: class means have a low variance ratio, copies a low nearest ratio, real data neither."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.core.noise import numpy_generator
from bottega.tasks.metrics.spread import nearest_distances, nearest_ratio, variance_ratio


def dataset(name: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images of 6 x 6 in five classes, each with its own mean and four directions of variation."""
    labels = np.arange(n) % 5
    means = numpy_generator(0, "means").standard_normal((5, 36))
    directions = numpy_generator(0, "ways").standard_normal((5, 4, 36))
    amounts = numpy_generator(0, name).standard_normal((n, 4))
    return (means[labels] + np.einsum("nk,nkd->nd", amounts, directions[labels])).reshape(n, 6, 6), labels


def test_ratios_of_real_data_are_about_one() -> None:
    (x, x_labels), (y, y_labels), (held_out, _) = dataset("x", 2000), dataset("y", 2000), dataset("held", 1000)
    assert variance_ratio(x, x_labels, y, y_labels) == pytest.approx(1, abs=0.05)
    assert nearest_ratio(nearest_distances(x, y), nearest_distances(held_out, y)) == pytest.approx(1, abs=0.1)


def test_a_model_of_class_means_has_no_variance() -> None:
    real, labels = dataset("x", 500)
    means = np.stack([real[labels == label].mean(0) for label in range(5)])[labels]
    blurred = means + 0.01 * (real - means)
    assert variance_ratio(means, labels, real, labels) < 1e-12
    assert variance_ratio(blurred, labels, real, labels) == pytest.approx(1e-4)


def test_a_model_that_copies_is_at_distance_zero() -> None:
    (train, labels), (held_out, _) = dataset("x", 500), dataset("held", 200)
    assert nearest_ratio(nearest_distances(train[::-1][:100], train), nearest_distances(held_out, train)) == 0
    # Only the distance detects it: its variance is that of the data.
    assert variance_ratio(train[:250], labels[:250], train, labels) == pytest.approx(1, abs=0.2)


def test_variance_ratio_of_small_examples() -> None:
    x, labels = np.array([[0.0, 0], [2, 0], [5, 5], [5, 9], [7, 7]]), np.array([3, 3, 1, 1, 0])
    # Class 3: 2 + 0; class 1: 0 + 8; class 0 has a single sample and is ignored.
    assert variance_ratio(x, labels, np.array([[0.0, 0], [0, 2], [0, 0], [0, 1]]), np.array([3, 3, 1, 1])) == 10 / 2.5
    # Classes 3 and 1 are in both; 4 is not.
    assert variance_ratio(np.concatenate([x, x[:2] + 100]), np.append(labels, [4, 4]), 2 * x, labels) == 0.25
    assert math.isnan(variance_ratio(x[:1], labels[:1], x, labels))
    assert math.isnan(variance_ratio(x, labels, x, labels + 10))
    assert math.isnan(variance_ratio(x, labels, 0 * x, labels))


def test_bytes_do_not_overflow() -> None:
    x = np.array([[0], [255], [10]], np.uint8)
    labels = np.array([0, 0, 1])
    assert variance_ratio(x, labels, x.astype(np.float64), labels) == 1
    np.testing.assert_array_equal(nearest_distances(x, np.array([[250]], np.uint8)), [250, 5, 240])


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 7), st.integers(1, 50), st.floats(-1e3, 1e3))
def test_nearest_distances_do_not_depend_on_the_chunk_size(n: int, m: int, chunk: int, d: int, offset: float) -> None:
    x, reference = (
        numpy_generator(1, name, size).standard_normal((size, d)) + offset for name, size in (("x", n), ("r", m))
    )
    brute = np.sqrt(((x[:, None] - reference[None]) ** 2).sum(-1)).min(1)
    np.testing.assert_allclose(nearest_distances(x, reference, max_rows=chunk), brute, rtol=1e-4, atol=1e-9)
    assert (nearest_distances(reference, reference, max_rows=chunk) == 0).all()


def test_nearest_distances_use_memory_of_a_few_chunks() -> None:
    """A chunk of 500 x 500 float32 distances is 1 MB, and a few exist at a time: below 4 MB in all.

    The distances of all 4,000 x 8,000 pairs would be 128 MB, and their differences (16 values each) 2 GB.
    """
    reference = numpy_generator(2, "reference").random((8000, 16), dtype=np.float32)
    tracemalloc.start()
    distances = nearest_distances(reference[:4000] + np.float32(0.5), reference, max_rows=500)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert distances.shape == (4000,)
    assert peak < 4e6


def test_nan_samples_have_no_distance() -> None:
    x = np.zeros((3, 4))
    x[1, 2] = np.nan
    assert np.isnan(nearest_distances(x, np.ones((5, 4)))).tolist() == [False, True, False]


def test_nearest_ratio_is_undefined_if_the_held_out_samples_are_training_samples() -> None:
    assert math.isnan(nearest_ratio(np.ones(2), np.zeros(2)))


def test_variance_ratio_of_bytes_needs_little_memory() -> None:
    """Converted to float64 at once, these 32 MiB would need 256 MiB more; a chunk has 2^22 values, 32 MiB, and a few exist."""
    x = numpy_generator(0, "bytes").integers(0, 256, (8000, 4096), np.uint8)
    labels = np.zeros(8000, int)
    tracemalloc.start()
    try:
        ratio = variance_ratio(x, labels, x[:2000], labels[:2000])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 128 << 20
    subset = x[:2000].astype(np.float64)
    expected = x.var(0, ddof=1).sum() / subset.var(0, ddof=1).sum()
    assert ratio == pytest.approx(expected, rel=1e-9)
