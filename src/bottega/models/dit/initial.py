"""Initial weights of diffusion transformers and their conditions, drawn in numpy."""

from __future__ import annotations

import math

import numpy as np

from bottega.core.noise import numpy_generator

ZERO_INITIALISED = (".modulation.weight", "modulation_out.weight", ".cross.to_out.weight", "out.weight")
"""Parameters that start at 0, so that each block is the identity and the first prediction is 0."""


def initial_value(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return the initial value of one parameter.

    Biases and ZERO_INITIALISED are 0, embeddings and the time MLP are small normal, and matrices are Glorot uniform.
    """
    if name.endswith(".bias") or (name.endswith(ZERO_INITIALISED) and not name.endswith("attn.to_out.weight")):
        return np.zeros(shape, np.float32)
    generator = numpy_generator(seed, name)
    if len(shape) < 2 or "embedding" in name or ".time." in f".{name}":
        return 0.02 * generator.standard_normal(shape, dtype=np.float32)
    limit = math.sqrt(6 / (shape[0] + math.prod(shape[1:])))
    return generator.uniform(-limit, limit, shape).astype(np.float32)
