"""The Fréchet distance between Gaussians fitted to two sets of features (Heusel et al., 2017).

n samples, d features. With the features of `bottega.models.metric_networks.inception` it is the FID.
"""

from __future__ import annotations

import math

import numpy as np

from bottega.core.errors import UsageError

# Number of rows that are centred at once: 4,096 rows of 2,048 features take 64 MiB in float64; 50,000 would take 800 MiB.
CHUNK_SIZE = 4096


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return |mean_a - mean_b|^2 + Tr(C_a + C_b - 2 sqrt(C_a C_b)) of (n, d) and (m, d); NaN if not finite."""
    assert a.ndim == b.ndim == 2, "features are [samples, features]"
    assert a.shape[1] == b.shape[1], "both sets have the same features"
    return distance_of_moments(feature_moments(a), feature_moments(b))


def feature_moments(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean (d,) and the unbiased covariance (d, d) in float64; those of real data can be cached."""
    if len(features) < 2:
        raise UsageError(f"a Fréchet distance needs at least 2 samples on each side, got {len(features)}; use more")
    mean = features.mean(0, dtype=np.float64)
    total = np.zeros((features.shape[1], features.shape[1]))
    for start in range(0, len(features), CHUNK_SIZE):
        centred = features[start : start + CHUNK_SIZE] - mean
        total += centred.T @ centred
    return mean, total / (len(features) - 1)


def distance_of_moments(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> float:
    """Return the Fréchet distance from means and covariances."""
    (mean_a, covariance_a), (mean_b, covariance_b) = a, b
    if not all(np.isfinite(part).all() for part in (*a, *b)):
        return math.nan
    # Tr sqrt(Ca^1/2 Cb Ca^1/2) is the sum of the singular values of Ca^1/2 Cb^1/2. This avoids square roots of
    # rounding errors: eigenvalues of the product would leave 1e-8 for each feature without variance.
    trace_root = np.linalg.svd(
        _factor_covariance(covariance_a).T @ _factor_covariance(covariance_b), compute_uv=False
    ).sum()
    spread = np.trace(covariance_a) + np.trace(covariance_b) - 2 * trace_root
    return max(0.0, float(((mean_a - mean_b) ** 2).sum() + spread))


def _factor_covariance(covariance: np.ndarray) -> np.ndarray:
    """Return R (d, rank) with R R' = covariance; of n samples the rank is at most n - 1."""
    values, vectors = np.linalg.eigh(covariance)
    is_positive = values > values[-1] * len(values) * np.finfo(np.float64).eps
    return vectors[:, is_positive] * np.sqrt(values[is_positive])
