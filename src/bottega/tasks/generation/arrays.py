"""What the formulas of generation need of arrays of numpy, torch and JAX alike, without importing torch or JAX."""

from __future__ import annotations

import sys
from typing import Any

from bottega.core.types import Array


def get_namespace(x: Array) -> Any:
    """Return the module of an array: numpy, jax.numpy, or torch, whose arrays alone do not name it."""
    return x.__array_namespace__() if hasattr(x, "__array_namespace__") else sys.modules["torch"]


def as_float32(x: Array) -> Array:
    """Return `x` in float32."""
    return x.float() if hasattr(x, "float") else x.astype(get_namespace(x).float32)


def fill_rows(value: Array, x: Array) -> Array:
    """Return `value` for each row of `x`, float32 (rows,)."""
    if hasattr(x, "new_full"):
        return x.new_full((len(x),), value)
    xp = get_namespace(x)
    return xp.full(len(x), value, dtype=xp.float32)


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)); by torch's own function for torch, which rounds otherwise."""
    xp = get_namespace(x)
    return xp.sigmoid(x) if hasattr(xp, "sigmoid") else 1 / (1 + xp.exp(-x))
