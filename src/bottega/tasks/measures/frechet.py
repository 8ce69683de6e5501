"""The Fréchet distance between two sets of features, each taken for a Gaussian (Heusel et al., 2017).

n: samples, d: features. The features decide what it means; with those of `bottega.models.metric_networks.inception` it is the FID.
"""

from __future__ import annotations

import math

import numpy as np

from bottega.core.errors import UsageError

# Rows centred at once: 4,096 of 2,048 features are 64 MiB in float64, where 50,000 would be 800.
ROWS = 4096


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """|mean_a - mean_b|^2 + Tr(C_a + C_b - 2 sqrt(C_a C_b)) of a [n, d] and b [m, d]; NaN if a feature is not finite."""
    assert a.ndim == b.ndim == 2, "features are [samples, features]"
    assert a.shape[1] == b.shape[1], "both sets have the same features"
    return distance_of_moments(feature_moments(a), feature_moments(b))


def feature_moments(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean [d] and unbiased covariance [d, d] in float64. Those of the real data can be kept between validations."""
    if len(features) < 2:
        raise UsageError(f"a Fréchet distance needs at least 2 samples on each side, got {len(features)}; ask for more")
    mean = features.mean(0, dtype=np.float64)
    total = np.zeros((features.shape[1], features.shape[1]))
    for start in range(0, len(features), ROWS):
        centred = features[start : start + ROWS] - mean
        total += centred.T @ centred
    return mean, total / (len(features) - 1)


def distance_of_moments(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> float:
    """The same from means and covariances."""
    (mean_a, covariance_a), (mean_b, covariance_b) = a, b
    if not all(np.isfinite(part).all() for part in (*a, *b)):
        return math.nan
    # Tr sqrt(Ca^1/2 Cb Ca^1/2) is the sum of the singular values of Ca^1/2 Cb^1/2. Taken so, no root of a rounding
    # error is added up: the eigenvalues of the product would leave 1e-8 for each feature without variance.
    shared = np.linalg.svd(_root(covariance_a).T @ _root(covariance_b), compute_uv=False).sum()
    spread = np.trace(covariance_a) + np.trace(covariance_b) - 2 * shared
    return max(0.0, float(((mean_a - mean_b) ** 2).sum() + spread))


def _root(covariance: np.ndarray) -> np.ndarray:
    """R [d, r] with R R' = covariance, where r is its rank: with n samples at most n - 1."""
    values, vectors = np.linalg.eigh(covariance)
    kept = values > values[-1] * len(values) * np.finfo(np.float64).eps
    return vectors[:, kept] * np.sqrt(values[kept])
