"""Structural similarity (SSIM) of images (Wang et al., 2004): luminance, contrast and structure in a Gaussian window.

SSIM depends on the range of the values: with 255 for images in -1..1 every pair looks alike, with 1 for bytes none does. So
bytes always have the range 255, and floats need `data_range`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from bottega.core.errors import UsageError

WINDOW_SIZE: Final = 11
SIGMA: Final = 1.5
K1, K2 = 0.01, 0.03
RANGE_TOLERANCE = 1e-5
"""Fraction of the range by which floats may exceed it: rounding of a decoder's tanh in float32."""


def ssim(a: np.ndarray, b: np.ndarray, *, data_range: float | None = None) -> np.ndarray:
    """Return the SSIM (n,) of image pairs (n, h, w, c), the mean over channels and window positions; 1 for equal images.

    `data_range` is the largest minus the smallest possible value, 2 for -1..1; bytes need none.
    """
    assert a.shape == b.shape, f"{a.shape} and {b.shape} are not pairs of images"
    assert a.ndim == 4, "images are (n, h, w, c)"
    resolved_range = _resolve_range(a, b, data_range)
    if min(a.shape[1:3]) < WINDOW_SIZE:
        raise UsageError(
            f"SSIM needs at least {WINDOW_SIZE} x {WINDOW_SIZE} pixels, but the images have {a.shape[2]} x {a.shape[1]}; use larger images"
        )
    return np.array([_compute_pair_ssim(first, second, resolved_range) for first, second in _iterate_pairs(a, b)])


def _resolve_range(a: np.ndarray, b: np.ndarray, data_range: float | None) -> float:
    if a.dtype != b.dtype:
        raise UsageError(f"SSIM of {a.dtype} and {b.dtype}: the dtypes differ; convert both to one")
    if a.dtype == np.uint8:
        if data_range not in (None, 255):
            raise UsageError(f"SSIM of bytes has the range 255, not {data_range:g}; remove data_range")
        return 255.0
    if not np.issubdtype(a.dtype, np.floating):
        raise UsageError(f"SSIM of {a.dtype}: give bytes, or floats and their data_range")
    if data_range is None:
        raise UsageError("SSIM of floats needs their data_range: 2 for images in -1..1, 1 for 0..1")
    if a.size:
        spread = float(np.maximum(a.max(), b.max()) - np.minimum(a.min(), b.min()))
        if not 0 < data_range < np.inf or not spread <= data_range * (1 + RANGE_TOLERANCE):
            raise UsageError(
                f"SSIM: data_range is {data_range:g}, but the values span {spread:g}; set data_range to the possible range, 2 for -1..1"
            )
    return float(data_range)


def _iterate_pairs(a: np.ndarray, b: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs in float64 one at a time: five filtered copies of a whole set would not fit in memory."""
    for first, second in zip(a, b, strict=True):
        yield first.astype(np.float64), second.astype(np.float64)


def _compute_pair_ssim(a: np.ndarray, b: np.ndarray, data_range: float) -> float:
    c1, c2 = (K1 * data_range) ** 2, (K2 * data_range) ** 2
    # Moments about a common shift: E[x^2] - E[x]^2 of bytes would lose the small variance of a flat image.
    shift = (a.mean() + b.mean()) / 2
    shifted_a, shifted_b = a - shift, b - shift
    mean_a, mean_b = _blur(shifted_a), _blur(shifted_b)
    variances = _blur(shifted_a**2) - mean_a**2 + _blur(shifted_b**2) - mean_b**2
    covariance = _blur(shifted_a * shifted_b) - mean_a * mean_b
    mean_a, mean_b = mean_a + shift, mean_b + shift
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    return float((luminance * (2 * covariance + c2) / (variances + c2)).mean())


def _blur(x: np.ndarray) -> np.ndarray:
    """Return (h - 10, w - 10, c): only positions where the whole window is inside the image, as in the paper."""
    weights = gaussian_window()
    blurred_rows = sum(weight * x[i : len(x) - WINDOW_SIZE + 1 + i] for i, weight in enumerate(weights))
    return sum(weight * blurred_rows[:, i : x.shape[1] - WINDOW_SIZE + 1 + i] for i, weight in enumerate(weights))


def gaussian_window() -> np.ndarray:
    """Return the window (11,); its outer product with itself sums to 1."""
    offsets = np.arange(WINDOW_SIZE) - WINDOW_SIZE // 2
    weights = np.exp(-(offsets**2) / (2 * SIGMA**2))
    return weights / weights.sum()
