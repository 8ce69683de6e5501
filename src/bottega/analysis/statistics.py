"""Tests of whether two groups of numbers differ, each a plain function: t, Wilcoxon, McNemar, bootstrap, Holm, effect sizes.

All tests are two-sided. With two groups, the difference is the first minus the second. Distributions come from scipy.stats,
imported where they are used because that takes a second; what scipy does not have stands here as a formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from bottega.core import noise

MAX_EXACT_PAIRS = 50
"""Maximum number of pairs for which the distribution of Wilcoxon's statistic is enumerated."""
MIN_CHI_SQUARE_DISCORDANT = 25
"""Minimum number of discordant samples for which McNemar's test uses the chi-square distribution."""
ROUNDING_TOLERANCE = 1e-12
"""Two numbers count as equal if their difference, relative to the values, is not larger: 0.9 - 0.8 and 0.8 - 0.7 differ by
rounding alone."""
NUM_RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """A confidence interval and its level, such as 0.95."""

    low: float
    high: float
    level: float


@dataclass(frozen=True)
class TTestResult:
    """Result of a t-test: `difference` over its `standard_error`, with `df` degrees of freedom.

    Without any spread the statistic is infinite, or 0 if all values are equal.
    """

    statistic: float
    p: float
    df: float
    n: int
    difference: float
    standard_error: float

    def confidence_interval(self, level: float = 0.95) -> Interval:
        """Return the interval of the true difference; it excludes 0 exactly when p is below 1 - level."""
        return _compute_t_interval(self.difference, self.standard_error, df=self.df, level=level)


@dataclass(frozen=True)
class WilcoxonResult:
    """Result of Wilcoxon's signed-rank test.

    `positive` and `negative` are the sums of the ranks of differences above and below 0, `statistic` is the smaller of them,
    and `n` counts the differences other than 0.
    """

    statistic: float
    p: float
    n: int
    positive: float
    negative: float
    method: Literal["exact", "normal"]


@dataclass(frozen=True)
class McNemarResult:
    """Result of McNemar's test. `statistic` is chi-square, or for the exact test the smaller count; `n` is the number of discordant samples."""

    statistic: float
    p: float
    n: int
    method: Literal["exact binomial", "chi-square"]


@dataclass(frozen=True)
class EffectSize:
    """Cohen's `d` in standard deviations, and Hedges' `g`, which corrects it for small samples (Hedges, 1981)."""

    name: Literal["d_z", "d_s"]
    d: float
    g: float


@dataclass(frozen=True)
class Comparison:
    """Two groups compared by the test that fits them. `effect` is (name, size, corrected size or None)."""

    test: str
    n: int
    statistic: float
    df: float | None
    p: float
    difference: float
    interval: Interval
    effect: tuple[str, float, float | None]
    bootstrap: dict[str, Interval]
    ranks: WilcoxonResult | None = None
    """A second test that does not assume normal differences; None if the pairs are not independent."""


def compare_paired(a: np.ndarray, b: np.ndarray, *, level: float, test_train_ratio: float | None = None) -> Comparison:
    """Compare paired values by a t-test, which has most power with few pairs.

    `test_train_ratio` is n_test / n_train if the pairs are folds of a cross-validation.
    """
    t, effect = corrected_resampled_t_test(a, b, test_train_ratio=test_train_ratio or 0.0), paired_effect_size(a, b)
    ranks = wilcoxon_test(a, b, method="exact" if len(a) <= MAX_EXACT_PAIRS else "auto")
    name = "paired t-test" if test_train_ratio is None else "corrected resampled t-test"
    result: tuple[str, float, float | None, float] = (name, t.statistic, t.df, t.p)
    if math.isinf(t.statistic):
        # All pairs have the same difference, as an accuracy over few samples may: the p of a t-test would be 0, even for two pairs.
        result = ("Wilcoxon signed-rank test", ranks.statistic, None, ranks.p)
    return Comparison(
        result[0],
        len(a),
        *result[1:],
        difference=t.difference,
        interval=t.confidence_interval(level),
        effect=(effect.name, effect.d, effect.g),
        bootstrap=_bootstrap_intervals(_subtract_pairs(a, b), level=level),
        ranks=ranks if test_train_ratio is None else None,
    )


def compare_unpaired(a: np.ndarray, b: np.ndarray, *, level: float) -> Comparison:
    """Compare two independent groups by Welch's t-test."""
    t, effect = welch_t_test(a, b), unpaired_effect_size(a, b)
    return Comparison(
        "Welch's t-test",
        t.n,
        t.statistic,
        t.df,
        t.p,
        difference=t.difference,
        interval=t.confidence_interval(level),
        effect=(effect.name, effect.d, effect.g),
        bootstrap=_bootstrap_intervals(a, b, level=level),
    )


def compare_classifiers(a: np.ndarray, b: np.ndarray, *, level: float) -> Comparison:
    """Compare two classifiers by McNemar's test; `a` and `b` are true for the samples that each classified correctly."""
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    test = mcnemar_test(only_a, only_b)
    bootstrap = _bootstrap_intervals(a.astype(float) - b.astype(float), level=level)
    odds = only_a / only_b if only_b else math.inf if only_a else 1.0
    return Comparison(
        f"McNemar's test ({test.method})",
        test.n,
        test.statistic,
        1 if test.method == "chi-square" else None,
        test.p,
        difference=float(a.mean() - b.mean()),
        interval=bootstrap["bca"],
        effect=("odds ratio", odds, None),
        bootstrap=bootstrap,
    )


def paired_t_test(a: np.ndarray, b: np.ndarray) -> TTestResult:
    """Student's t-test of paired differences."""
    return corrected_resampled_t_test(a, b, test_train_ratio=0.0)


def corrected_resampled_t_test(a: np.ndarray, b: np.ndarray, *, test_train_ratio: float) -> TTestResult:
    """The corrected resampled t-test of Nadeau and Bengio (2003); `test_train_ratio` is n_test / n_train.

    Folds share most of their training data, so their differences vary less than those of independent runs would. The
    variance of the mean over k folds is taken as (1/k + n_test/n_train) times the variance of the differences, not 1/k times.
    """
    differences = _subtract_pairs(a, b)
    n = len(differences)
    standard_error = _compute_standard_deviation(differences, a, b) * math.sqrt(1 / n + test_train_ratio)
    return _run_t_test(float(differences.mean()), standard_error, df=n - 1, n=n, scale=_compute_scale(a, b))


def welch_t_test(a: np.ndarray, b: np.ndarray) -> TTestResult:
    """Welch's t-test of two independent groups, whose variances may differ."""
    assert len(a) > 1, "one number has no spread"
    assert len(b) > 1, "one number has no spread"
    variances = [_compute_standard_deviation(values, a, b) ** 2 / len(values) for values in (a, b)]
    standard_error = math.sqrt(sum(variances))
    if standard_error > 0:
        df = sum(variances) ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(variances, (a, b), strict=True))
    else:
        df = len(a) + len(b) - 2
    return _run_t_test(float(a.mean() - b.mean()), standard_error, df=df, n=len(a) + len(b), scale=_compute_scale(a, b))


def wilcoxon_test(
    a: np.ndarray, b: np.ndarray, *, method: Literal["auto", "exact", "normal"] = "auto"
) -> WilcoxonResult:
    """Wilcoxon's signed-rank test of paired values; differences of 0 are left out.

    "exact" enumerates all 2^n signs of the ranks, also if ranks are tied, which scipy does not. "normal" is the
    approximation with corrections for continuity and ties. "auto" is exact for at most `MAX_EXACT_PAIRS` without ties.
    """
    from scipy import stats

    differences = np.round(_subtract_pairs(a, b) / _compute_scale(a, b) / ROUNDING_TOLERANCE)
    differences = differences[differences != 0]
    n = len(differences)
    ranks = stats.rankdata(np.abs(differences))
    positive, negative = float(ranks[differences > 0].sum()), float(ranks[differences < 0].sum())
    smaller_sum = min(positive, negative)
    if method == "exact" or (method == "auto" and n <= MAX_EXACT_PAIRS and len(np.unique(ranks)) == n):
        assert n <= MAX_EXACT_PAIRS, f"{n} pairs are too many to enumerate"
        return WilcoxonResult(smaller_sum, _compute_signed_rank_p(ranks, smaller_sum), n, positive, negative, "exact")
    p = float(stats.wilcoxon(differences, correction=True, method="asymptotic").pvalue) if n else 1.0
    return WilcoxonResult(smaller_sum, p, n, positive, negative, "normal")


def _compute_signed_rank_p(ranks: np.ndarray, smaller_sum: float) -> float:
    """Return twice the fraction of the 2^n signs whose positive ranks sum to `smaller_sum` or less."""
    doubled_ranks = np.round(2 * ranks).astype(int)  # middle ranks of ties end in a half
    num_ways = np.zeros(int(doubled_ranks.sum()) + 1)
    num_ways[0] = 1
    for rank in doubled_ranks:
        num_ways[rank:] += num_ways[:-rank].copy()
    return min(1.0, float(2 * num_ways[: round(2 * smaller_sum) + 1].sum() / num_ways.sum()))


def mcnemar_test(only_first: int, only_second: int) -> McNemarResult:
    """McNemar's test of two classifiers, from the numbers of samples that only the first or only the second gets right."""
    from scipy import stats

    n = only_first + only_second
    if n < MIN_CHI_SQUARE_DISCORDANT:
        smaller_count = min(only_first, only_second)
        return McNemarResult(
            smaller_count, float(min(1.0, 2 * stats.binom.cdf(smaller_count, n, 0.5))), n, "exact binomial"
        )
    statistic = max(0, abs(only_first - only_second) - 1) ** 2 / n  # less 1 for continuity
    return McNemarResult(statistic, float(stats.chi2.sf(statistic, 1)), n, "chi-square")


def holm_correction(ps: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm's step-down method.

    If all tests with an adjusted p below alpha are called significant, the probability that any of these calls is false is at
    most alpha.
    """
    adjusted, largest_so_far = [0.0] * len(ps), 0.0
    for position, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest_so_far = max(largest_so_far, min(1.0, (len(ps) - position) * ps[i]))
        adjusted[i] = largest_so_far
    return adjusted


def mean_confidence_interval(values: np.ndarray, *, level: float = 0.95, test_train_ratio: float = 0.0) -> Interval:
    """Return the t interval of a mean; `test_train_ratio` is that of `corrected_resampled_t_test` if the values are of folds."""
    standard_error = _compute_standard_deviation(values, values) * math.sqrt(1 / len(values) + test_train_ratio)
    return _compute_t_interval(float(values.mean()), standard_error, df=len(values) - 1, level=level)


def wilson_interval(num_correct: int, n: int, *, level: float = 0.95) -> Interval:
    """Return Wilson's interval of a proportion such as an accuracy: it stays between 0 and 1 and is accurate near both."""
    from scipy import stats

    interval = stats.binomtest(num_correct, n).proportion_ci(level, method="wilson")
    return Interval(float(interval.low), float(interval.high), level)


def bootstrap_interval(
    a: np.ndarray,
    b: np.ndarray | None = None,
    *,
    level: float = 0.95,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
    method: Literal["percentile", "bca"] = "bca",
) -> Interval:
    """Return the bootstrap interval of mean(a), or of mean(a) - mean(b) for independent groups.

    "bca" corrects the percentiles for bias and for a variance that grows with the mean (Efron, 1987). With a handful of
    values both are too narrow, since only observed values can be drawn.
    """
    samples = [a] if b is None else [a, b]
    signs = (1, -1)
    means = np.zeros(num_resamples)
    for number, values in enumerate(samples):
        # A mean depends only on how often each value is drawn; the differences of 100,000 predictions have only 3 distinct values.
        distinct_values, counts = np.unique(values, return_counts=True)
        rng = noise.numpy_generator(seed, "bootstrap", number)
        draw_counts = rng.multinomial(len(values), counts / len(values), size=num_resamples)
        means += signs[number] * (draw_counts @ distinct_values) / len(values)
    quantiles = ((1 - level) / 2, (1 + level) / 2)
    if method == "bca":
        quantiles = bca_quantiles(means, samples, level=level)
    low, high = np.quantile(means, quantiles)
    return Interval(float(low), float(high), level)


def _bootstrap_intervals(a: np.ndarray, b: np.ndarray | None = None, *, level: float) -> dict[str, Interval]:
    return {
        "percentile": bootstrap_interval(a, b, level=level, method="percentile"),
        "bca": bootstrap_interval(a, b, level=level, method="bca"),
    }


def bca_quantiles(means: np.ndarray, samples: Sequence[np.ndarray], *, level: float) -> tuple[float, float]:
    """Return which quantiles of the resampled `means` bound the interval, corrected for bias and acceleration."""
    observed = [float(values.mean()) for values in samples]
    estimate = observed[0] - (observed[1] if len(observed) > 1 else 0.0)
    fraction_below = (float((means < estimate).mean()) + float((means <= estimate).mean())) / 2
    normal = NormalDist()
    bias = normal.inv_cdf(min(max(fraction_below, 0.5 / len(means)), 1 - 0.5 / len(means)))
    # The influence of a value on a mean is its distance from the mean, so no jackknife is needed.
    influence = [(sign * (v - v.mean()) / len(v)) for sign, v in zip((1, -1), samples, strict=False)]
    cubes = sum(float((values**3).sum()) for values in influence)
    squares = sum(float((values**2).sum()) for values in influence)
    acceleration = cubes / (6 * squares**1.5) if squares > 0 else 0.0

    def correct(quantile: float) -> float:
        z = bias + normal.inv_cdf(quantile)
        return normal.cdf(bias + z / (1 - acceleration * z))

    return correct((1 - level) / 2), correct((1 + level) / 2)


def paired_effect_size(a: np.ndarray, b: np.ndarray) -> EffectSize:
    """Cohen's d_z: the mean difference in standard deviations of the differences."""
    differences = _subtract_pairs(a, b)
    d = _compute_ratio(
        float(differences.mean()), _compute_standard_deviation(differences, a, b), scale=_compute_scale(a, b)
    )
    return EffectSize("d_z", d, d * hedges_correction(len(differences) - 1))


def unpaired_effect_size(a: np.ndarray, b: np.ndarray) -> EffectSize:
    """Cohen's d_s: the difference of means in pooled standard deviations of the groups."""
    df = len(a) + len(b) - 2
    squares = sum((len(values) - 1) * _compute_standard_deviation(values, a, b) ** 2 for values in (a, b))
    d = _compute_ratio(float(a.mean() - b.mean()), math.sqrt(squares / df), scale=_compute_scale(a, b))
    return EffectSize("d_s", d, d * hedges_correction(df))


def hedges_correction(df: int) -> float:
    """Return the factor that removes the bias of d: 0.564 for 2 degrees of freedom, 0.923 for 10; NaN for 1, for which d has no mean."""
    if df < 2:
        return math.nan
    return math.exp(math.lgamma(df / 2) - math.lgamma((df - 1) / 2)) / math.sqrt(df / 2)


def _run_t_test(difference: float, standard_error: float, *, df: float, n: int, scale: float) -> TTestResult:
    from scipy import stats

    statistic = _compute_ratio(difference, standard_error, scale=scale)
    return TTestResult(statistic, float(2 * stats.t.sf(abs(statistic), df)), df, n, difference, standard_error)


def _compute_ratio(difference: float, deviation: float, *, scale: float) -> float:
    if deviation > 0:
        return difference / deviation
    return 0.0 if abs(difference) <= ROUNDING_TOLERANCE * scale else math.copysign(math.inf, difference)


def _subtract_pairs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    assert len(a) == len(b), f"{len(a)} and {len(b)} numbers are not pairs"
    assert len(a) > 1, "one pair has no spread"
    return np.asarray(a, np.float64) - np.asarray(b, np.float64)


def _compute_standard_deviation(values: np.ndarray, *measured: np.ndarray) -> float:
    """Return the standard deviation of `values`; 0 if it is no more than rounding of the values `measured`."""
    deviation = float(np.std(values, ddof=1))
    return deviation if deviation > ROUNDING_TOLERANCE * _compute_scale(*measured) else 0.0


def _compute_scale(*measured: np.ndarray) -> float:
    return max(float(np.abs(values).max()) for values in measured) or 1.0


def _compute_t_interval(centre: float, standard_error: float, *, df: float, level: float) -> Interval:
    from scipy import stats

    half_width = float(stats.t.isf((1 - level) / 2, df)) * standard_error
    return Interval(centre - half_width, centre + half_width, level)
