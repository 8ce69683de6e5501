"""Structural similarity of two pictures (Wang et al., 2004): luminance, contrast and structure under a Gaussian window.

The range of the values is part of the measure. With 255 for pictures in -1..1 every pair looks alike; with 1 for bytes
none does. So bytes have their own range and of floats it has to be said.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from bottega.core.errors import UsageError

WINDOW: Final = 11
SIGMA: Final = 1.5
K1, K2 = 0.01, 0.03
ROUNDING = 1e-5
"""Share of the range that floats may go beyond it by: a decoder's tanh in float32."""


def ssim(a: np.ndarray, b: np.ndarray, *, data_range: float | None = None) -> np.ndarray:
    """[n] of pictures [n, h, w, c], 1 where they are equal; the mean over channels and over all places of the window.

    `data_range` is the largest value there can be less the smallest: 2 for -1..1. Bytes need none.
    """
    assert a.shape == b.shape, f"{a.shape} and {b.shape} are no pairs of pictures"
    assert a.ndim == 4, "pictures are [n, h, w, c]"
    extent = _extent(a, b, data_range)
    if min(a.shape[1:3]) < WINDOW:
        raise UsageError(
            f"SSIM looks through {WINDOW} x {WINDOW} pixels, and pictures have {a.shape[2]} x {a.shape[1]}"
        )
    return np.array([_similarity(one, other, extent) for one, other in _pairs(a, b)])


def _extent(a: np.ndarray, b: np.ndarray, data_range: float | None) -> float:
    if a.dtype != b.dtype:
        raise UsageError(f"SSIM of {a.dtype} and {b.dtype}: two scales; bring both to one")
    if a.dtype == np.uint8:
        if data_range not in (None, 255):
            raise UsageError(f"SSIM of bytes has the range 255, not {data_range:g}; leave data_range out")
        return 255.0
    if not np.issubdtype(a.dtype, np.floating):
        raise UsageError(f"SSIM of {a.dtype}: give bytes, or floats and their data_range")
    if data_range is None:
        raise UsageError("SSIM of floats needs their data_range: 2 for pictures in -1..1, 1 for 0..1")
    if a.size:
        spread = float(np.maximum(a.max(), b.max()) - np.minimum(a.min(), b.min()))
        if not 0 < data_range < np.inf or not spread <= data_range * (1 + ROUNDING):
            raise UsageError(f"SSIM: data_range {data_range:g}, and the values are {spread:g} apart; 2 is for -1..1")
    return float(data_range)


def _pairs(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """One at a time: five filtered copies in float64 of a whole set would not fit."""
    for one, other in zip(a, b, strict=True):
        yield one.astype(np.float64), other.astype(np.float64)


def _similarity(a: np.ndarray, b: np.ndarray, extent: float) -> float:
    c1, c2 = (K1 * extent) ** 2, (K2 * extent) ** 2
    # Moments about a shift that both share: squares of bytes less squares of their mean lose what a flat picture has.
    shift = (a.mean() + b.mean()) / 2
    near_a, near_b = a - shift, b - shift
    mean_a, mean_b = _blurred(near_a), _blurred(near_b)
    variances = _blurred(near_a**2) - mean_a**2 + _blurred(near_b**2) - mean_b**2
    covariance = _blurred(near_a * near_b) - mean_a * mean_b
    mean_a, mean_b = mean_a + shift, mean_b + shift
    light = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    return float((light * (2 * covariance + c2) / (variances + c2)).mean())


def _blurred(x: np.ndarray) -> np.ndarray:
    """[h - 10, w - 10, c]: only where the whole window lies within the picture, as in the paper."""
    weights = gaussian_window()
    down = sum(weight * x[i : len(x) - WINDOW + 1 + i] for i, weight in enumerate(weights))
    return sum(weight * down[:, i : x.shape[1] - WINDOW + 1 + i] for i, weight in enumerate(weights))


def gaussian_window() -> np.ndarray:
    """[11] whose outer product with itself sums to 1."""
    places = np.arange(WINDOW) - WINDOW // 2
    weights = np.exp(-(places**2) / (2 * SIGMA**2))
    return weights / weights.sum()
