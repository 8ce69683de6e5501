"""What a CLIP says of pictures, from unit vectors alone: how near to words and to other pictures, and which word fits.

n: pictures, d: width of where both towers meet.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROUNDING = 1e-3
"""How far from 1 a unit vector in half precision may be."""


def cosine_similarity(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[n] cosines of unit vectors [n, d] with their partners [n, d]."""
    _check(a, b)
    assert a.shape == b.shape, f"{a.shape} and {b.shape} are no pairs"
    return np.einsum("nd,nd->n", a.astype(np.float64), b.astype(np.float64))


def similarity_to_history(pictures: np.ndarray, histories: Sequence[np.ndarray]) -> np.ndarray:
    """[n] means of the cosines of each picture [d] with all that its person liked [h_i, d]; NaN where that is nothing."""
    assert len(pictures) == len(histories), "one history a picture"
    _check(pictures, *histories)
    return np.array(
        [float((liked @ one).mean()) if len(liked) else np.nan for one, liked in zip(pictures, histories, strict=True)]
    )


def classify_zero_shot(pictures: np.ndarray, choices: np.ndarray) -> list[int]:
    """Of each picture [n, d] the number of the nearest choice [k, d]; these may be means of several unit vectors."""
    lengths = np.linalg.norm(choices, axis=1, keepdims=True)
    units = choices / np.maximum(lengths, 1e-12)
    found: list[int] = (pictures.astype(np.float64) @ units.T).argmax(1).tolist()
    return found


def _check(*several: np.ndarray) -> None:
    for vectors in several:
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1)
        assert np.all(np.abs(lengths - 1) < ROUNDING), "unit vectors: a cosine is no dot product of anything else"
