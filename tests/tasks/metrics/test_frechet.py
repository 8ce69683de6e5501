"""The Fréchet distance matches closed-form values, also with fewer samples than features."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bottega.core.errors import UsageError
from bottega.core.noise import numpy_generator
from bottega.tasks.metrics import frechet
from bottega.tasks.metrics.frechet import distance_of_moments, feature_moments, frechet_distance


def draw_with_moments(name: str, mean: np.ndarray, root: np.ndarray, n: int) -> np.ndarray:
    """Return samples with mean `mean` and unbiased covariance root @ root.T, up to rounding."""
    samples = numpy_generator(0, name).standard_normal((n, len(mean)))
    white, _ = np.linalg.qr(samples - samples.mean(0))
    return mean + math.sqrt(n - 1) * white @ root.T


def test_diagonal_gaussians_have_the_distance_of_their_means_and_deviations() -> None:
    means, deviations = np.array([[1.0, 2, 3], [0, 2, 5]]), np.array([[1.0, 2, 0.5], [3, 0.1, 0.5]])
    a, b = (draw_with_moments(f"set {i}", means[i], np.diag(deviations[i]), 50 + i) for i in range(2))
    # (1 + 0 + 4) of the means, (4 + 1.9^2 + 0) of the deviations.
    assert frechet_distance(a, b) == pytest.approx(5 + 4 + 1.9**2, abs=1e-10)
    assert frechet_distance(b, a) == pytest.approx(frechet_distance(a, b), abs=1e-10)


@pytest.mark.parametrize("angle", [0.0, 0.3, math.pi / 4, math.pi / 2])
def test_a_rotated_gaussian_has_the_closed_form_distance(angle: float) -> None:
    """In 2-D, Tr sqrt(M) = sqrt(Tr M + 2 sqrt(det M)), here with variances 9 and 1 and one Gaussian rotated."""
    rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    variances = np.diag([9.0, 1.0])
    trace = 82 * math.cos(angle) ** 2 + 18 * math.sin(angle) ** 2
    expected = 20 - 2 * math.sqrt(trace + 2 * 9)
    a = draw_with_moments("plain", np.zeros(2), np.sqrt(variances), 40)
    b = draw_with_moments("turned", np.zeros(2), rotation @ np.sqrt(variances), 60)
    assert frechet_distance(a, b) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize(("n", "d"), [(2, 5), (20, 300), (300, 20)])
def test_distance_to_itself_is_zero_and_to_a_shift_is_its_square(n: int, d: int) -> None:
    features = numpy_generator(1, "features").standard_normal((n, d)).astype(np.float32)
    assert frechet_distance(features, features) < 1e-9
    assert frechet_distance(features, features.astype(np.float64) + 0.5) == pytest.approx(0.25 * d, rel=1e-9)


def test_few_samples_have_the_same_distance_in_the_subspace_they_span() -> None:
    """30 + 30 samples in 500 dimensions lie in 60 of them, and a rotation changes no distance."""
    a, b = (numpy_generator(2, name).standard_normal((30, 500)) for name in "ab")
    base, _ = np.linalg.qr(np.concatenate([a, b]).T)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(a @ base, b @ base), rel=1e-10)


def test_it_matches_scipy() -> None:
    linalg = pytest.importorskip("scipy.linalg", reason="scipy is the reference")
    mixing = numpy_generator(3, "mixing").standard_normal((12, 12))
    a, b = (
        numpy_generator(3, "a").standard_normal((200, 12)),
        1 + numpy_generator(3, "b").standard_normal((150, 12)) @ mixing,
    )
    product = np.cov(a.T) @ np.cov(b.T)
    spread = np.trace(np.cov(a.T) + np.cov(b.T) - 2 * linalg.sqrtm(product).real)
    assert frechet_distance(a, b) == pytest.approx(((a.mean(0) - b.mean(0)) ** 2).sum() + spread, rel=1e-9)


def test_moments_do_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    features = numpy_generator(4, "features").standard_normal((37, 5)).astype(np.float32) + 100
    mean, covariance = feature_moments(features)
    np.testing.assert_allclose(covariance, np.cov(features.T.astype(np.float64)), rtol=1e-9)
    monkeypatch.setattr(frechet, "CHUNK_SIZE", 8)
    np.testing.assert_allclose(feature_moments(features)[1], covariance, rtol=1e-12)
    assert distance_of_moments((mean, covariance), feature_moments(features)) < 1e-9


def test_one_sample_is_refused_and_nan_features_give_nan() -> None:
    with pytest.raises(UsageError, match="at least 2 samples on each side, got 1"):
        frechet_distance(np.zeros((1, 3)), np.zeros((5, 3)))
    broken = np.zeros((4, 3))
    broken[1, 1] = np.nan
    assert math.isnan(frechet_distance(broken, np.zeros((5, 3))))
    assert frechet_distance(np.zeros((4, 3)), np.ones((4, 3))) == 3
