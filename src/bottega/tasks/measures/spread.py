"""How far samples lie from one another and from the training data: what tells a model from its mean and from a copy.

n: samples, m: references, ...: any shape of a sample, the same in all arguments.
"""

from __future__ import annotations

import math

import numpy as np

# Rows at once, and numbers in them: 2,048 x 2,048 distances are 16 MiB, 2^22 numbers are 32 MiB in float64.
CHUNK = 2048
NUMBERS = 1 << 22


def variance_ratio(
    generated: np.ndarray, generated_labels: np.ndarray, real: np.ndarray, real_labels: np.ndarray
) -> float:
    """1 where samples of a class differ as much as real ones do, 0 where a model knows the mean of a class only.

    Over the classes of which both sides have 2 samples or more; NaN without such a class or without real variance.
    """
    ours, theirs = _variances(generated, generated_labels), _variances(real, real_labels)
    shared = sorted(ours.keys() & theirs.keys())
    wanted = sum(theirs[label] for label in shared)
    return sum(ours[label] for label in shared) / wanted if wanted > 0 else math.nan


def nearest_distances(x: np.ndarray, reference: np.ndarray, *, chunk: int = CHUNK) -> np.ndarray:
    """The Euclidean distance of each of x [n, ...] to the nearest of reference [m, ...]: float64 [n], 0 for a copy.

    Numbers of any kind, such as the bytes of pixels: they become floats a chunk at a time, since all at once would be
    eight times as many bytes. The search is a float32 product of matrices; the nearest of each chunk is measured again in float64, because the
    product would put a copy at 0.01 and not at 0. Memory is that of a few chunks, whatever n and m.
    """
    assert x.shape[1:] == reference.shape[1:], "samples and references have the same shape"
    assert len(reference) > 0, "there is something to be near to"
    size = math.prod(x.shape[1:])
    rows = max(1, min(chunk, NUMBERS // max(size, 1)))
    flat, others = x.reshape(len(x), size), reference.reshape(len(reference), size)
    # Distances are those of the differences, so a common offset only costs digits.
    centre = others.mean(0, dtype=np.float64)
    found = np.full(len(x), np.inf)
    for start in range(0, len(x), rows):
        block = flat[start : start + rows]
        narrow = (block - centre).astype(np.float32)
        for first in range(0, len(others), rows):
            candidates = others[first : first + rows]
            nearest = candidates[_nearest(narrow, (candidates - centre).astype(np.float32))]
            exact = np.sqrt(((block.astype(np.float64) - nearest) ** 2).sum(1))
            found[start : start + rows] = np.minimum(found[start : start + rows], exact)
    return found


def nearest_ratio(generated: np.ndarray, held_out: np.ndarray) -> float:
    """Of distances to the training data: the median of the samples' over that of held-out data.

    0 for a model that returns what it was trained on, about 1 for fresh data; NaN where held-out data are in train.
    """
    usual = np.median(held_out)
    return float(np.median(generated) / usual) if usual > 0 else math.nan


def _variances(x: np.ndarray, labels: np.ndarray) -> dict[int, float]:
    """Class -> its variance, for those with 2 samples or more."""
    assert len(x) == len(labels), "one label for each sample"
    flat = x.reshape(len(x), math.prod(x.shape[1:]))
    classes, counts = np.unique(labels, return_counts=True)
    return {int(label): _variance(flat, np.flatnonzero(labels == label)) for label in classes[counts >= 2]}


def _variance(flat: np.ndarray, places: np.ndarray) -> float:
    """Unbiased, added up over the numbers of a sample; in float64 a chunk at a time."""
    rows = max(1, min(CHUNK, NUMBERS // max(flat.shape[1], 1)))
    parts = [places[start : start + rows] for start in range(0, len(places), rows)]
    mean = sum(flat[part].sum(0, dtype=np.float64) for part in parts) / len(places)
    return float(sum(((flat[part] - mean) ** 2).sum() for part in parts) / (len(places) - 1))


def _nearest(x: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """[n]: the index of the nearest. |x|^2 is the same for all references, so it is left out."""
    scores = x @ reference.T
    scores *= -2
    scores += (reference**2).sum(1)
    return scores.argmin(1)
