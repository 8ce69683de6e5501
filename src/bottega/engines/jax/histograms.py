"""Histograms of weights and gradients in JAX, computed within a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bottega.core.callback import Histogram

NUM_BINS = 64
Array = Any


class DeviceHistogram(NamedTuple):
    """Smallest and largest finite value, and the counts of the equal bins between them, on the device."""

    low: Array
    high: Array
    counts: Array


def compute_histograms(parameters: Mapping[str, Array], gradients: Mapping[str, Array]) -> dict[str, DeviceHistogram]:
    """Return the histograms of the parameters that have a gradient, and of the gradients."""
    tensors = {f"weights/{name}": parameters[name] for name in gradients}
    tensors |= {f"gradients/{name}": gradient for name, gradient in gradients.items()}
    return {name: compute_histogram(tensor) for name, tensor in tensors.items() if tensor.size}


def compute_histogram(values: Array) -> DeviceHistogram:
    """Count the finite elements of `values` in NUM_BINS bins between the smallest and the largest."""
    flat = values.reshape(-1)
    is_finite = jnp.isfinite(flat)
    low, high = jnp.min(jnp.where(is_finite, flat, jnp.inf)), jnp.max(jnp.where(is_finite, flat, -jnp.inf))
    # A constant needs bins of some width.
    margin = jnp.where(low == high, jnp.maximum(jnp.abs(low) * 2.0**-20, 0.5), 0.0)
    low, high = low - margin, high + margin
    # Halves, because the difference of two float32 may overflow.
    position = jnp.nan_to_num((flat / 2 - low / 2) / (high / 2 - low / 2) * NUM_BINS)
    bins = jnp.where(is_finite, jnp.clip(position, 0, NUM_BINS - 1).astype(jnp.int32), NUM_BINS)
    return DeviceHistogram(low, high, jnp.zeros(NUM_BINS + 1, jnp.int32).at[bins].add(1)[:NUM_BINS])


def fetch_histograms(histograms: Mapping[str, DeviceHistogram]) -> dict[str, Histogram]:
    """Copy the histograms to the host, which waits for the device. Tensors without a finite value are left out."""
    fetched = jax.device_get(dict(histograms))
    return {
        name: Histogram(
            tuple(np.linspace(float(h.low), float(h.high), NUM_BINS + 1).tolist()), tuple(h.counts.tolist())
        )
        for name, h in fetched.items()
        if h.low <= h.high
    }
