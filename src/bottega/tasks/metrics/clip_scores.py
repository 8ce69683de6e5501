"""Scores from CLIP embeddings: similarity of images to texts and other images, and zero-shot classification.

n images, d dimensions of the shared embedding; embeddings are unit vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NORM_TOLERANCE = 1e-3
"""Tolerance for the length of a unit vector in half precision."""


def cosine_similarity(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosines (n,) of pairs of unit vectors (n, d)."""
    _check_unit_vectors(a, b)
    assert a.shape == b.shape, f"{a.shape} and {b.shape} are not pairs"
    return np.einsum("nd,nd->n", a.astype(np.float64), b.astype(np.float64))


def similarity_to_history(images: np.ndarray, histories: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean cosine (n,) of each image (d,) with the images its user liked (h_i, d); NaN for an empty history."""
    assert len(images) == len(histories), "one history for each image"
    _check_unit_vectors(images, *histories)
    return np.array(
        [
            float((liked @ image).mean()) if len(liked) else np.nan
            for image, liked in zip(images, histories, strict=True)
        ]
    )


def classify_zero_shot(images: np.ndarray, choices: np.ndarray) -> list[int]:
    """Return for each image (n, d) the index of the nearest choice (k, d); choices may be means of several unit vectors."""
    lengths = np.linalg.norm(choices, axis=1, keepdims=True)
    units = choices / np.maximum(lengths, 1e-12)
    nearest: list[int] = (images.astype(np.float64) @ units.T).argmax(1).tolist()
    return nearest


def _check_unit_vectors(*arrays: np.ndarray) -> None:
    for vectors in arrays:
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1)
        assert np.all(np.abs(lengths - 1) < NORM_TOLERANCE), "expected unit vectors: only their dot product is a cosine"
