"""Diversity of samples and their distance from the training data: they show mode collapse and memorisation.

n samples, m references; samples may have any shape, the same in all arguments.
"""

from __future__ import annotations

import math

import numpy as np

# Limits of a chunk, in rows and in values: 2,048 x 2,048 distances are 16 MiB, 2^22 values are 32 MiB in float64.
MAX_CHUNK_ROWS = 2048
MAX_CHUNK_VALUES = 1 << 22


def variance_ratio(
    generated: np.ndarray, generated_labels: np.ndarray, real: np.ndarray, real_labels: np.ndarray
) -> float:
    """Return the variance within classes of generated over real samples: about 1 for a good model, 0 for class means.

    Only classes with 2 or more samples on both sides count; NaN without such a class or without real variance.
    """
    generated_variances, real_variances = (
        _compute_class_variances(generated, generated_labels),
        _compute_class_variances(real, real_labels),
    )
    shared = sorted(generated_variances.keys() & real_variances.keys())
    total = sum(real_variances[label] for label in shared)
    return sum(generated_variances[label] for label in shared) / total if total > 0 else math.nan


def nearest_distances(x: np.ndarray, reference: np.ndarray, *, max_rows: int = MAX_CHUNK_ROWS) -> np.ndarray:
    """Return the Euclidean distance of each of x (n, ...) to the nearest of reference (m, ...): float64 (n,), 0 for a copy.

    Values of any dtype, such as uint8 pixels, become floats a chunk at a time, so memory does not grow with n and m. The
    search is a float32 matrix product; the nearest of each chunk is measured again in float64, because the product would
    put a copy at 0.01 instead of 0.
    """
    assert x.shape[1:] == reference.shape[1:], "samples and references have the same shape"
    assert len(reference) > 0, "at least one reference is needed"
    size = math.prod(x.shape[1:])
    rows = max(1, min(max_rows, MAX_CHUNK_VALUES // max(size, 1)))
    flat, flat_references = x.reshape(len(x), size), reference.reshape(len(reference), size)
    # A common offset does not change distances and costs precision.
    centre = flat_references.mean(0, dtype=np.float64)
    distances = np.full(len(x), np.inf)
    for start in range(0, len(x), rows):
        block = flat[start : start + rows]
        block_float32 = (block - centre).astype(np.float32)
        for first in range(0, len(flat_references), rows):
            candidates = flat_references[first : first + rows]
            nearest = candidates[_find_nearest(block_float32, (candidates - centre).astype(np.float32))]
            block_distances = np.sqrt(((block.astype(np.float64) - nearest) ** 2).sum(1))
            distances[start : start + rows] = np.minimum(distances[start : start + rows], block_distances)
    return distances


def nearest_ratio(generated_distances: np.ndarray, held_out_distances: np.ndarray) -> float:
    """Return the median distance of generated samples to the training data over that of held-out samples.

    Both arguments are what `nearest_distances` returns. 0 for a model that returns training samples, about 1 for new data; NaN if half of the held-out data is also training data.
    """
    reference = np.median(held_out_distances)
    return float(np.median(generated_distances) / reference) if reference > 0 else math.nan


def _compute_class_variances(x: np.ndarray, labels: np.ndarray) -> dict[int, float]:
    """Return class -> its variance, for classes with 2 samples or more."""
    assert len(x) == len(labels), "one label for each sample"
    flat = x.reshape(len(x), math.prod(x.shape[1:]))
    classes, counts = np.unique(labels, return_counts=True)
    return {int(label): _compute_variance(flat, np.flatnonzero(labels == label)) for label in classes[counts >= 2]}


def _compute_variance(flat: np.ndarray, indices: np.ndarray) -> float:
    """Return the unbiased variance of rows summed over values, in float64 a chunk at a time."""
    rows = max(1, min(MAX_CHUNK_ROWS, MAX_CHUNK_VALUES // max(flat.shape[1], 1)))
    chunks = [indices[start : start + rows] for start in range(0, len(indices), rows)]
    mean = sum(flat[chunk].sum(0, dtype=np.float64) for chunk in chunks) / len(indices)
    return float(sum(((flat[chunk] - mean) ** 2).sum() for chunk in chunks) / (len(indices) - 1))


def _find_nearest(x: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the index of the nearest reference, (n,). |x|^2 is the same for all references, so it is left out."""
    scores = x @ reference.T
    scores *= -2
    scores += (reference**2).sum(1)
    return scores.argmin(1)
