"""Tests of whether two groups of numbers differ, each a plain function: t, Wilcoxon, McNemar, bootstrap, Holm, effect sizes.

All are two-sided. Where there are two groups, the difference is the first minus the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from bottega.analysis.tails import binomial_tail, chi_square_tail, normal_two_sided, t_quantile, t_two_sided
from bottega.core import noise

MAX_EXACT_PAIRS = 50
"""Pairs up to which Wilcoxon's distribution is counted out."""
MIN_CHI_SQUARE_DISCORDANT = 25
ROUNDING = 1e-12
"""Share of the values themselves below which a difference is rounding: 0.9 - 0.8 and 0.8 - 0.7 are no two numbers."""
NUM_RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    low: float
    high: float
    level: float


@dataclass(frozen=True)
class TTestResult:
    """`difference` over its standard `error`. Without any spread the statistic is infinite, or 0 where all is equal."""

    statistic: float
    p: float
    df: float
    n: int
    difference: float
    standard_error: float

    def confidence_interval(self, level: float = 0.95) -> Interval:
        """Where the true difference may lie; leaves 0 out exactly when p is below 1 - level."""
        return _around(self.difference, self.standard_error, df=self.df, level=level)


@dataclass(frozen=True)
class WilcoxonResult:
    """`statistic` is the smaller of the two sums of ranks; n counts the differences that are not 0."""

    statistic: float
    p: float
    n: int
    positive: float
    negative: float
    method: Literal["exact", "normal"]


@dataclass(frozen=True)
class McNemarResult:
    """`statistic` is chi-square, or for the exact test the smaller of the two counts; n is the discordant samples."""

    statistic: float
    p: float
    n: int
    method: Literal["exact binomial", "chi-square"]


@dataclass(frozen=True)
class EffectSize:
    """`d` in standard deviations, and `g`, the same without the bias that few numbers bring (Hedges, 1981)."""

    name: Literal["d_z", "d_s"]
    d: float
    g: float


@dataclass(frozen=True)
class Comparison:
    """Two groups by the test that fits them. `effect` is (name, size, size without bias or None)."""

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
    """A second opinion that needs no normal differences, where there are independent pairs."""


def compare_paired(a: np.ndarray, b: np.ndarray, *, level: float, test_train_ratio: float | None = None) -> Comparison:
    """By t, which finds most with few pairs; `ratio` is n_test / n_train where the pairs are folds."""
    t, effect = corrected_resampled_t_test(a, b, test_train_ratio=test_train_ratio or 0.0), paired_effect_size(a, b)
    ranks = wilcoxon_test(a, b, method="exact" if len(a) <= MAX_EXACT_PAIRS else "auto")
    name = "paired t-test" if test_train_ratio is None else "corrected resampled t-test"
    found: tuple[str, float, float | None, float] = (name, t.statistic, t.df, t.p)
    if math.isinf(t.statistic):
        # The same difference in all pairs, as of an accuracy over few samples: t would call two of them certainty.
        found = ("Wilcoxon signed-rank test", ranks.statistic, None, ranks.p)
    return Comparison(
        found[0],
        len(a),
        *found[1:],
        difference=t.difference,
        interval=t.confidence_interval(level),
        effect=(effect.name, effect.d, effect.g),
        bootstrap=_bootstraps(_differences(a, b), level=level),
        ranks=ranks if test_train_ratio is None else None,
    )


def compare_unpaired(a: np.ndarray, b: np.ndarray, *, level: float) -> Comparison:
    """By Welch's t."""
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
        bootstrap=_bootstraps(a, b, level=level),
    )


def compare_classifiers(a: np.ndarray, b: np.ndarray, *, level: float) -> Comparison:
    """Of two classifiers by McNemar; a and b are whether they were right, sample by sample."""
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    test = mcnemar_test(only_a, only_b)
    bootstrap = _bootstraps(a.astype(float) - b.astype(float), level=level)
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
    """Student's t of the differences, which stand in pairs."""
    return corrected_resampled_t_test(a, b, test_train_ratio=0.0)


def corrected_resampled_t_test(a: np.ndarray, b: np.ndarray, *, test_train_ratio: float) -> TTestResult:
    """The corrected resampled t-test of Nadeau and Bengio (2003); `ratio` is n_test / n_train.

    Folds share most of their training data, so their differences vary less than those of independent runs would. The
    variance of the mean is taken as 1/k + n_test/n_train of theirs, not 1/k.
    """
    differences = _differences(a, b)
    n = len(differences)
    error = _spread(differences, a, b) * math.sqrt(1 / n + test_train_ratio)
    return _t_test(float(differences.mean()), error, df=n - 1, n=n, scale=_scale(a, b))


def welch_t_test(a: np.ndarray, b: np.ndarray) -> TTestResult:
    """Welch's t of two groups without pairs, which may vary by different amounts."""
    assert len(a) > 1, "one number has no spread"
    assert len(b) > 1, "one number has no spread"
    parts = [_spread(values, a, b) ** 2 / len(values) for values in (a, b)]
    error = math.sqrt(sum(parts))
    if error > 0:
        df = sum(parts) ** 2 / sum(part**2 / (len(v) - 1) for part, v in zip(parts, (a, b), strict=True))
    else:
        df = len(a) + len(b) - 2
    return _t_test(float(a.mean() - b.mean()), error, df=df, n=len(a) + len(b), scale=_scale(a, b))


def wilcoxon_test(
    a: np.ndarray, b: np.ndarray, *, method: Literal["auto", "exact", "normal"] = "auto"
) -> WilcoxonResult:
    """Wilcoxon's signed ranks. Differences of 0 are left out, as he did.

    auto counts all signs out for small n without ties, and else takes the normal approximation with corrections for
    continuity and ties. exact also counts out tied ranks: all 2^n signs of the ranks as they are.
    """
    differences = np.round(_differences(a, b) / _scale(a, b) / ROUNDING)
    differences = differences[differences != 0]
    n = len(differences)
    sizes, places, ties = np.unique(np.abs(differences), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[places]
    positive, negative = float(ranks[differences > 0].sum()), float(ranks[differences < 0].sum())
    smaller = min(positive, negative)
    if method == "exact" or (method == "auto" and n <= MAX_EXACT_PAIRS and len(sizes) == n):
        assert n <= MAX_EXACT_PAIRS, f"{n} pairs are too many to count out"
        return WilcoxonResult(smaller, _signed_ranks_p(ranks, smaller), n, positive, negative, "exact")
    variance = float(n * (n + 1) * (2 * n + 1) / 24 - (ties.astype(float) ** 3 - ties).sum() / 48)
    distance = max(0.0, n * (n + 1) / 4 - smaller - 0.5)
    p = normal_two_sided(distance / math.sqrt(variance)) if variance > 0 else 1.0
    return WilcoxonResult(smaller, p, n, positive, negative, "normal")


def _signed_ranks_p(ranks: np.ndarray, smaller: float) -> float:
    """Twice the share of the 2^n signs whose positive ranks sum to `smaller` or less."""
    doubled = np.round(2 * ranks).astype(int)  # middle ranks of ties end in a half
    ways = np.zeros(int(doubled.sum()) + 1)
    ways[0] = 1
    for rank in doubled:
        ways[rank:] += ways[:-rank].copy()
    return min(1.0, float(2 * ways[: round(2 * smaller) + 1].sum() / ways.sum()))


def mcnemar_test(only_first: int, only_second: int) -> McNemarResult:
    """Of samples that just one of two classifiers has right: are they shared out evenly?"""
    n = only_first + only_second
    if n < MIN_CHI_SQUARE_DISCORDANT:
        smaller = min(only_first, only_second)
        return McNemarResult(smaller, min(1.0, 2 * binomial_tail(smaller, n)), n, "exact binomial")
    statistic = max(0, abs(only_first - only_second) - 1) ** 2 / n  # less 1 for continuity
    return McNemarResult(statistic, chi_square_tail(statistic, 1), n, "chi-square")


def holm_correction(ps: Sequence[float]) -> list[float]:
    """Holm's step-down: below alpha each, and the chance of a single false one among them is below alpha."""
    adjusted, least = [0.0] * len(ps), 0.0
    for place, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        least = max(least, min(1.0, (len(ps) - place) * ps[i]))
        adjusted[i] = least
    return adjusted


def mean_confidence_interval(values: np.ndarray, *, level: float = 0.95, test_train_ratio: float = 0.0) -> Interval:
    """Of a mean, by t. `ratio` is n_test / n_train where the values are folds; see `resampled_t`."""
    error = _spread(values, values) * math.sqrt(1 / len(values) + test_train_ratio)
    return _around(float(values.mean()), error, df=len(values) - 1, level=level)


def wilson_interval(num_correct: int, n: int, *, level: float = 0.95) -> Interval:
    """Of a share such as an accuracy (Wilson, 1927): it stays between 0 and 1 and is right near both."""
    z, share = _normal_quantile((1 + level) / 2), num_correct / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Interval(max(0.0, centre - half), min(1.0, centre + half), level)


def bootstrap_interval(
    a: np.ndarray,
    b: np.ndarray | None = None,
    *,
    level: float = 0.95,
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
    method: Literal["percentile", "bca"] = "bca",
) -> Interval:
    """Of a mean of differences `a`, or of mean(a) - mean(b) without pairs, by drawing again from what was seen.

    bca corrects the percentiles for bias and for a spread that grows with the mean (Efron, 1987). With a handful of
    numbers both are too narrow, since what was not seen cannot be drawn.
    """
    samples = [a] if b is None else [a, b]
    signs = (1, -1)
    drawn = np.zeros(num_resamples)
    for number, values in enumerate(samples):
        # How often each value is drawn is all a mean needs; a hundred thousand right and wrong answers are 3 values.
        distinct, counts = np.unique(values, return_counts=True)
        rng = noise.numpy_generator(seed, "bootstrap", number)
        often = rng.multinomial(len(values), counts / len(values), size=num_resamples)
        drawn += signs[number] * (often @ distinct) / len(values)
    shares = ((1 - level) / 2, (1 + level) / 2)
    if method == "bca":
        shares = bca_quantiles(drawn, samples, level=level)
    low, high = np.quantile(drawn, shares)
    return Interval(float(low), float(high), level)


def _bootstraps(a: np.ndarray, b: np.ndarray | None = None, *, level: float) -> dict[str, Interval]:
    return {
        "percentile": bootstrap_interval(a, b, level=level, method="percentile"),
        "bca": bootstrap_interval(a, b, level=level, method="bca"),
    }


def bca_quantiles(drawn: np.ndarray, samples: Sequence[np.ndarray], *, level: float) -> tuple[float, float]:
    """Which percentiles of the means `drawn` to read: the two of the level, corrected for bias and acceleration."""
    means = [float(values.mean()) for values in samples]
    estimate = means[0] - (means[1] if len(means) > 1 else 0.0)
    below = (float((drawn < estimate).mean()) + float((drawn <= estimate).mean())) / 2
    bias = _normal_quantile(min(max(below, 0.5 / len(drawn)), 1 - 0.5 / len(drawn)))
    # What each value does to a mean is its distance from it, so nothing has to be left out in turn.
    away = [(sign * (v - v.mean()) / len(v)) for sign, v in zip((1, -1), samples, strict=False)]
    cubes = sum(float((part**3).sum()) for part in away)
    squares = sum(float((part**2).sum()) for part in away)
    acceleration = cubes / (6 * squares**1.5) if squares > 0 else 0.0

    def corrected(share: float) -> float:
        z = bias + _normal_quantile(share)
        return NormalDist().cdf(bias + z / (1 - acceleration * z))

    return corrected((1 - level) / 2), corrected((1 + level) / 2)


def paired_effect_size(a: np.ndarray, b: np.ndarray) -> EffectSize:
    """Cohen's d_z: the mean difference in deviations of the differences."""
    differences = _differences(a, b)
    d = _over(float(differences.mean()), _spread(differences, a, b), scale=_scale(a, b))
    return EffectSize("d_z", d, d * hedges_correction(len(differences) - 1))


def unpaired_effect_size(a: np.ndarray, b: np.ndarray) -> EffectSize:
    """Cohen's d_s: the difference of means in deviations within the groups, pooled."""
    df = len(a) + len(b) - 2
    squares = sum((len(values) - 1) * _spread(values, a, b) ** 2 for values in (a, b))
    d = _over(float(a.mean() - b.mean()), math.sqrt(squares / df), scale=_scale(a, b))
    return EffectSize("d_s", d, d * hedges_correction(df))


def hedges_correction(df: int) -> float:
    """What takes the bias out of d: 0.564 of two degrees of freedom, 0.923 of ten. Of one it has no mean at all."""
    if df < 2:
        return math.nan
    return math.exp(math.lgamma(df / 2) - math.lgamma((df - 1) / 2)) / math.sqrt(df / 2)


def _t_test(difference: float, error: float, *, df: float, n: int, scale: float) -> TTestResult:
    statistic = _over(difference, error, scale=scale)
    return TTestResult(statistic, t_two_sided(statistic, df), df, n, difference, error)


def _over(difference: float, spread: float, *, scale: float) -> float:
    if spread > 0:
        return difference / spread
    return 0.0 if abs(difference) <= ROUNDING * scale else math.copysign(math.inf, difference)


def _differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    assert len(a) == len(b), f"{len(a)} and {len(b)} numbers are no pairs"
    assert len(a) > 1, "one pair has no spread"
    return np.asarray(a, np.float64) - np.asarray(b, np.float64)


def _spread(values: np.ndarray, *measured: np.ndarray) -> float:
    """The standard deviation; 0 where it is no more than the rounding of what was measured."""
    spread = float(np.std(values, ddof=1))
    return spread if spread > ROUNDING * _scale(*measured) else 0.0


def _scale(*measured: np.ndarray) -> float:
    return max(float(np.abs(values).max()) for values in measured) or 1.0


def _around(centre: float, error: float, *, df: float, level: float) -> Interval:
    half = t_quantile(1 - level, df) * error
    return Interval(centre - half, centre + half, level)


def _normal_quantile(p: float) -> float:
    return NormalDist().inv_cdf(p)
