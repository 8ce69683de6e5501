"""The state and the penalty of elastic weight consolidation in JAX: the twin of `torch.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

Array = Any


def create_zeros(parameters: Mapping[str, Array]) -> dict[str, Array]:
    """Return zeros like each parameter, by name; the engine passes those that are trained at some step."""
    return {name: jnp.zeros_like(value) for name, value in parameters.items()}


def sum_weighted_squares(weights: Sequence[Array], *, anchors: Sequence[Array], importances: Sequence[Array]) -> Array:
    """Return the sum over all weights of importance * (weight - anchor)^2."""
    costs = [
        (importance * jnp.square(weight - anchor)).sum()
        for weight, anchor, importance in zip(weights, anchors, importances, strict=True)
    ]
    return jnp.stack(costs).sum()
