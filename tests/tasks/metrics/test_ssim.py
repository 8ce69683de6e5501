"""Structural similarity: exact against a direct implementation of the paper; the data range is never guessed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.ndimage import correlate

from bottega.core.errors import UsageError
from bottega.core.noise import numpy_generator
from bottega.tasks.metrics.ssim import gaussian_window, ssim


def draw_images(seed: int, *, n: int = 2, height: int = 17, width: int = 14) -> np.ndarray:
    return numpy_generator(seed, "ssim").integers(0, 256, (n, height, width, 3), dtype=np.uint8)


def reference_ssim(a: np.ndarray, b: np.ndarray, data_range: float) -> float:
    """Equations 13 to 16 of Wang et al. window by window, in loops, with two-dimensional weights."""
    weights = np.array(
        [[math.exp(-((i - 5) ** 2 + (j - 5) ** 2) / (2 * 1.5**2)) for j in range(11)] for i in range(11)]
    )
    weights /= weights.sum()
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    values = []
    for channel in range(a.shape[2]):
        x, y = a[..., channel].astype(float), b[..., channel].astype(float)
        for top in range(x.shape[0] - 10):
            for left in range(x.shape[1] - 10):
                p, q = x[top : top + 11, left : left + 11], y[top : top + 11, left : left + 11]
                mean_p, mean_q = (weights * p).sum(), (weights * q).sum()
                var_p, var_q = (weights * (p - mean_p) ** 2).sum(), (weights * (q - mean_q) ** 2).sum()
                both = (weights * (p - mean_p) * (q - mean_q)).sum()
                numerator = (2 * mean_p * mean_q + c1) * (2 * both + c2)
                values.append(numerator / ((mean_p**2 + mean_q**2 + c1) * (var_p + var_q + c2)))
    return float(np.mean(values))


def scipy_ssim(a: np.ndarray, b: np.ndarray, data_range: float) -> float:
    """The usual formula with scipy's filter, cropped to windows inside the image."""
    line = np.exp(-((np.arange(11) - 5.0) ** 2) / 4.5)
    kernel = np.outer(line, line)[..., None] / line.sum() ** 2
    cut = (slice(5, -5), slice(5, -5))

    def blur(x: np.ndarray) -> np.ndarray:
        return correlate(x, kernel)[cut]

    x, y = a.astype(float), b.astype(float)
    mx, my = blur(x), blur(y)
    vx, vy, both = blur(x * x) - mx * mx, blur(y * y) - my * my, blur(x * y) - mx * my
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    return float(((2 * mx * my + c1) * (2 * both + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))).mean())


def test_it_matches_the_paper_and_scipy() -> None:
    a = draw_images(0)
    b = np.clip(a.astype(int) + numpy_generator(1, "n").integers(-60, 60, a.shape), 0, 255).astype(np.uint8)
    values = ssim(a, b)
    for i in range(len(a)):
        assert values[i] == pytest.approx(reference_ssim(a[i], b[i], 255), abs=1e-10)
        assert values[i] == pytest.approx(scipy_ssim(a[i], b[i], 255), abs=1e-10)
    assert 0.3 < values[0] < 0.95  # not near 0 or 1, where a wrong constant would not show


def test_floats_in_their_range_match_bytes() -> None:
    """The usual error is a wrong range for floats in -1..1: 255 makes all images similar, and 1 is too small."""
    a, b = draw_images(2), draw_images(3)
    ours = ssim(a, b)
    zero_one = [x.astype(np.float64) / 255 for x in (a, b)]
    assert ssim(*zero_one, data_range=1) == pytest.approx(ours, abs=1e-9)
    shifted = [x.astype(np.float64) / 127.5 - 1 for x in (a, b)]
    assert ssim(*shifted, data_range=2)[0] == pytest.approx(reference_ssim(shifted[0][0], shifted[1][0], 2), abs=1e-10)
    assert ssim(*shifted, data_range=255).min() > 0.9 > ours.max() + 0.5  # the effect of that error


def test_missing_or_wrong_ranges_are_refused() -> None:
    a = draw_images(4)
    floats = a.astype(np.float32) / 127.5 - 1
    for compute in (
        lambda: ssim(floats, floats),
        lambda: ssim(floats, -floats, data_range=1),
        lambda: ssim(a, a, data_range=1),
        lambda: ssim(a, floats),
        lambda: ssim(a, floats, data_range=255),
        lambda: ssim(a.astype(np.int64), a.astype(np.int64), data_range=255),
        lambda: ssim(floats, floats, data_range=0),
        lambda: ssim(floats, np.full_like(floats, np.nan), data_range=2),
        lambda: ssim(a[:, :10], a[:, :10]),
    ):
        with pytest.raises(UsageError, match="SSIM"):
            compute()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(11, 20), st.integers(11, 20))
def test_bounds_symmetry_and_invariances(seed: int, height: int, width: int) -> None:
    a, b = draw_images(seed, height=height, width=width), draw_images(seed + 1, height=height, width=width)
    values = ssim(a, b)
    assert np.abs(values).max() <= 1
    assert ssim(a, a) == pytest.approx(np.ones(2), abs=1e-12)
    assert ssim(b, a) == pytest.approx(values, abs=1e-12)
    # Flips, a transposition and reversed channels do not change the result.
    for changed in (lambda x: x[:, ::-1], lambda x: x[:, :, ::-1], lambda x: x.swapaxes(1, 2), lambda x: x[..., ::-1]):
        assert ssim(changed(a), changed(b)) == pytest.approx(values, abs=1e-12)
    # Colour is the mean over channels, and pairs are independent.
    per_channel = np.mean([ssim(a[..., i : i + 1], b[..., i : i + 1]) for i in range(3)], axis=0)
    assert per_channel == pytest.approx(values, abs=1e-12)
    assert ssim(a[1:], b[1:])[0] == values[1]


def test_more_noise_lowers_ssim_and_flat_images_differ_by_luminance() -> None:
    flat = np.full((1, 16, 16, 3), 100, np.uint8)
    other = np.full((1, 16, 16, 3), 150, np.uint8)
    c1 = (0.01 * 255) ** 2
    assert ssim(flat, other)[0] == pytest.approx((2 * 100 * 150 + c1) / (100**2 + 150**2 + c1), abs=1e-12)
    base = draw_images(5, height=32, width=32).astype(int)
    noise = numpy_generator(6, "n").normal(size=base.shape)
    values = [ssim(base.astype(np.uint8), np.clip(base + s * noise, 0, 255).astype(np.uint8))[0] for s in (0, 10, 40)]
    assert values[0] > values[1] > values[2]


def test_the_window_sums_to_one() -> None:
    assert gaussian_window().sum() == pytest.approx(1, abs=1e-15)
    assert gaussian_window()[5] / gaussian_window()[4] == pytest.approx(math.exp(1 / 4.5))
