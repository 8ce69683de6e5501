"""Statistical tests against scipy, published examples and derived values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as some

from bottega.analysis import statistics as st
from bottega.core import noise

# "The probable error of a mean", Student (1908): hours of sleep that two drugs gave to ten patients.
SLEEP_1 = np.array([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0])
SLEEP_2 = np.array([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])
# Hollander and Wolfe (1973), pages 29 f.: a depression scale before and after a tranquilliser.
BEFORE = np.array([1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30])
AFTER = np.array([0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29])

numbers = some.lists(some.floats(-5, 5).map(lambda x: round(x, 3)), min_size=2, max_size=12)


def draw_normal(*name: object, n: int) -> np.ndarray:
    return noise.numpy_generator(0, *name).normal(size=n)


# t, with and without pairs.


def test_paired_t_of_the_sleep_data() -> None:
    """R prints t = -4.0621, df = 9, p-value = 0.002833, interval -2.4598858 to -0.7001142."""
    result = st.paired_t_test(SLEEP_1, SLEEP_2)
    assert (result.df, result.n) == (9, 10)
    assert result.statistic == pytest.approx(-4.0621, abs=5e-5)
    assert result.p == pytest.approx(0.002833, abs=5e-7)
    assert result.difference == pytest.approx(-1.58)
    interval = result.confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((-2.4598858, -0.7001142), abs=5e-8)


def test_welch_t_of_the_sleep_data() -> None:
    """R prints t = -1.8608, df = 17.776, p-value = 0.07939, interval -3.3654832 to 0.2054832."""
    result = st.welch_t_test(SLEEP_1, SLEEP_2)
    assert result.statistic == pytest.approx(-1.8608, abs=5e-5)
    assert result.df == pytest.approx(17.776, abs=5e-4)
    assert result.p == pytest.approx(0.07939, abs=5e-6)
    interval = result.confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((-3.3654832, 0.2054832), abs=5e-8)


@settings(max_examples=60, deadline=None)
@given(some.lists(some.tuples(some.floats(-5, 5), some.floats(-5, 5)), min_size=2, max_size=12))
def test_t_tests_agree_with_scipy(pairs: list[tuple[float, float]]) -> None:
    a, b = np.array(pairs).round(3).T
    if np.std(a - b) > 1e-6:
        paired, expected = st.paired_t_test(a, b), scipy.stats.ttest_rel(a, b)
        assert (paired.statistic, paired.p) == pytest.approx((expected.statistic, expected.pvalue), abs=1e-10, rel=1e-8)
    if min(np.std(a), np.std(b)) > 1e-6:
        welch, expected = st.welch_t_test(a, b), scipy.stats.ttest_ind(a, b, equal_var=False)
        assert (welch.statistic, welch.p) == pytest.approx((expected.statistic, expected.pvalue), abs=1e-10, rel=1e-8)
        assert welch.df == pytest.approx(expected.df)


@settings(max_examples=60, deadline=None)
@given(numbers, some.sampled_from([0.01, 0.05, 0.3]))
def test_interval_excludes_zero_exactly_when_p_is_below_alpha(values: list[float], alpha: float) -> None:
    result = st.paired_t_test(np.array(values), np.zeros(len(values)))
    interval = result.confidence_interval(1 - alpha)
    if result.standard_error > 0 and abs(result.p - alpha) > 1e-9:
        assert (result.p < alpha) == (interval.low > 0 or interval.high < 0)


def test_differences_without_spread() -> None:
    """0.9 - 0.8 and 0.8 - 0.7 differ by rounding only."""
    a, b = np.array([0.9, 0.8, 0.7]), np.array([0.8, 0.7, 0.6])
    assert st.paired_t_test(a, b).statistic == math.inf
    assert st.paired_t_test(b, a).statistic == -math.inf
    assert (st.paired_t_test(a, a).statistic, st.paired_t_test(a, a).p) == (0.0, 1.0)
    assert st.welch_t_test(np.full(3, 0.1), np.full(3, 0.1)).p == 1.0
    assert st.paired_effect_size(a, b).d == math.inf


def test_corrected_resampled_t_test_of_ten_folds() -> None:
    """Nadeau and Bengio (2003): ten folds, so n_test / n_train is 1/9.

    The differences are 1, 3 five times over: mean 2, variance 10/9. t = 2 / sqrt((1/10 + 1/9) 10/9) = 2 / sqrt(190/810).
    """
    a, b = np.array([1.0, 3.0] * 5), np.zeros(10)
    result = st.corrected_resampled_t_test(a, b, test_train_ratio=1 / 9)
    assert result.df == 9
    assert result.statistic == pytest.approx(2 / math.sqrt(190 / 810))
    assert result.p == pytest.approx(2 * scipy.stats.t.sf(result.statistic, 9), abs=1e-10)
    assert st.corrected_resampled_t_test(a, b, test_train_ratio=0.0) == st.paired_t_test(a, b)


def test_correction_is_needed_for_overlapping_folds() -> None:
    """Two equally good learners, each with its own feature, on 15 random splits of the same 60 samples.

    The plain t-test rejects in two of five data sets instead of one in twenty. The corrected test is approximate: it
    rejects in about one of twelve.
    """
    rng = noise.numpy_generator(0, "learners")
    plain, corrected = 0, 0
    for _ in range(400):
        labels = rng.integers(0, 2, 60)
        features = rng.normal(size=(2, 60)) + labels
        scores = np.empty((2, 15))
        for split in range(15):
            test, train = np.split(rng.permutation(60), [12])
            for learner, x in enumerate(features):
                nearest = train[np.abs(x[test][:, None] - x[train]).argmin(1)]
                scores[learner, split] = (labels[nearest] == labels[test]).mean()
        plain += st.paired_t_test(*scores).p < 0.05
        corrected += st.corrected_resampled_t_test(*scores, test_train_ratio=12 / 48).p < 0.05
    assert plain > 0.3 * 400
    assert corrected < 0.125 * 400


# Ranks.


def test_wilcoxon_of_the_depression_scale() -> None:
    """Hollander and Wolfe give T+ = 40 and a one-sided p of 0.01953, as R does; both sides are twice that."""
    result = st.wilcoxon_test(BEFORE, AFTER)
    assert (result.positive, result.negative, result.n, result.method) == (40, 5, 9, "exact")
    assert result.p == pytest.approx(2 * 0.01953125)


@pytest.mark.parametrize(("n", "critical"), [(6, 0), (7, 2), (8, 3), (9, 5), (10, 8), (12, 13), (15, 25), (20, 52)])
def test_wilcoxon_critical_values(n: int, critical: int) -> None:
    """The largest sum of ranks with a two-sided p of at most 0.05, from textbooks."""
    ranks = np.arange(1, n + 1, dtype=float)
    assert st._compute_signed_rank_p(ranks, critical) <= 0.05 < st._compute_signed_rank_p(ranks, critical + 1)


def test_smallest_possible_wilcoxon_p() -> None:
    for n in range(2, 12):
        clear = np.arange(1.0, n + 1)
        assert st.wilcoxon_test(clear, np.zeros(n)).p == pytest.approx(2 / 2**n)
        tied = st.wilcoxon_test(np.ones(n), np.zeros(n), method="exact")
        assert tied.p == pytest.approx(2 / 2**n)


@settings(max_examples=60, deadline=None)
@given(numbers)
def test_wilcoxon_agrees_with_scipy(values: list[float]) -> None:
    a = np.array(values)
    a = a[a != 0]
    if len(a) < 2:
        return
    zero = np.zeros(len(a))
    is_tied = len(np.unique(np.abs(a))) < len(a)
    expected = scipy.stats.wilcoxon(a, correction=True, method="asymptotic" if is_tied else "exact")
    result = st.wilcoxon_test(a, zero)
    assert result.method == ("normal" if is_tied else "exact")
    assert (result.statistic, result.p) == pytest.approx((expected.statistic, expected.pvalue), abs=1e-10)


@settings(max_examples=25, deadline=None)
@given(some.lists(some.sampled_from([-3.0, -2.0, -1.0, 1.0, 2.0, 3.0]), min_size=2, max_size=8))
def test_exact_ranks_with_ties_count_all_signs(values: list[float]) -> None:
    a = np.array(values)
    ranks = scipy.stats.rankdata(np.abs(a))
    signs = np.array(np.meshgrid(*[[0, 1]] * len(a))).reshape(len(a), -1)
    sums = ranks @ signs
    smaller = min(ranks[a > 0].sum(), ranks[a < 0].sum())
    expected = min(1.0, 2 * float((sums <= smaller + 1e-9).mean()))
    assert st.wilcoxon_test(a, np.zeros(len(a)), method="exact").p == pytest.approx(expected)


def test_zeros_are_left_out_and_rounding_is_a_tie() -> None:
    assert st.wilcoxon_test(np.array([0.5, 0.7]), np.array([0.5, 0.7])).p == 1.0
    result = st.wilcoxon_test(np.array([0.9, 0.8, 0.5, 0.1]), np.array([0.8, 0.7, 0.3, 0.1]), method="exact")
    assert (result.n, result.positive) == (3, 6.0)
    assert (
        st.wilcoxon_test(np.array([0.9, 0.8]), np.array([0.8, 0.7])).method == "normal"
    )  # so they are treated as tied


def test_many_pairs_use_the_normal_approximation() -> None:
    a, b = draw_normal("a", n=80), draw_normal("b", n=80)
    expected = scipy.stats.wilcoxon(a, b, correction=True, method="asymptotic")
    result = st.wilcoxon_test(a, b)
    assert result.method == "normal"
    assert result.p == pytest.approx(expected.pvalue, abs=1e-10)


# Right and wrong predictions.


def test_mcnemar_of_approval_ratings() -> None:
    """Agresti (1990), page 350: 150 and 86 of 1,600 changed their mind.

    64^2 / 236 without the correction for continuity, for which R prints 17.3559 and p-value = 3.099e-05; 63^2 / 236 with.
    """
    plain = 64**2 / 236
    assert plain == pytest.approx(17.3559, abs=5e-5)
    assert scipy.stats.chi2.sf(plain, 1) == pytest.approx(3.099e-05, abs=5e-9)
    result = st.mcnemar_test(150, 86)
    assert (result.method, result.n) == ("chi-square", 236)
    assert result.statistic == pytest.approx(63**2 / 236)
    assert result.p == pytest.approx(scipy.stats.chi2.sf(63**2 / 236, 1), abs=1e-10)


def test_mcnemar_with_few_discordant() -> None:
    """Fagerland, Lydersen and Laake (2013), table 1: 1 against 7, so the exact p is 2 (1 + 8) / 2^8."""
    result = st.mcnemar_test(1, 7)
    assert (result.method, result.n, result.statistic) == ("exact binomial", 8, 1)
    assert result.p == pytest.approx(18 / 256)
    assert st.mcnemar_test(0, 0).p == st.mcnemar_test(3, 3).p == 1.0
    assert st.mcnemar_test(15, 15).p == 1.0


def test_mcnemar_switches_to_chi_square() -> None:
    assert st.mcnemar_test(12, 12).method == "exact binomial"
    assert st.mcnemar_test(12, 13).method == "chi-square"
    for n in range(1, 25):
        for k in range(n + 1):
            assert st.mcnemar_test(k, n - k).p == pytest.approx(scipy.stats.binomtest(k, n).pvalue, abs=1e-10)


# Multiple comparisons.


def test_holm_correction() -> None:
    """4 x 0.005, 3 x 0.01, 2 x 0.03, and 0.04 may not be smaller than the value before it."""
    assert st.holm_correction([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert st.holm_correction([0.5, 0.9]) == [1.0, 1.0]
    assert st.holm_correction([0.03]) == [0.03]


# Intervals.


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_of_published_examples(correct: int, n: int, low: float, high: float) -> None:
    """Newcombe (1998), table I, the score method without continuity correction."""
    interval = st.wilson_interval(correct, n)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)


def test_bca_percentiles_agree_with_scipy_on_the_same_draws() -> None:
    for samples in ([SLEEP_1 - SLEEP_2], [SLEEP_1, SLEEP_2[:7]]):
        statistic = (
            (lambda x, axis: x.mean(axis)) if len(samples) == 1 else (lambda x, y, axis: x.mean(axis) - y.mean(axis))
        )
        expected = scipy.stats.bootstrap(
            samples, statistic, n_resamples=4000, vectorized=True, method="BCa", rng=np.random.default_rng(0)
        )
        quantiles = st.bca_quantiles(expected.bootstrap_distribution, samples, level=0.95)
        result = np.quantile(expected.bootstrap_distribution, quantiles)
        assert result == pytest.approx(list(expected.confidence_interval), abs=1e-10)


def test_multinomial_resampling_agrees_with_scipy() -> None:
    """scipy resamples values, we resample counts; both have a Monte Carlo error of a few thousandths."""
    for samples in ([draw_normal("x", n=30)], [draw_normal("x", n=30), draw_normal("y", n=12) + 1]):
        statistic = (
            (lambda x, axis: x.mean(axis)) if len(samples) == 1 else (lambda x, y, axis: x.mean(axis) - y.mean(axis))
        )
        for method, name in (("percentile", "percentile"), ("bca", "BCa")):
            expected = scipy.stats.bootstrap(
                samples, statistic, n_resamples=40_000, method=name, rng=np.random.default_rng(1)
            ).confidence_interval
            result = st.bootstrap_interval(*samples, num_resamples=40_000, method=method)
            assert (result.low, result.high) == pytest.approx((expected.low, expected.high), abs=0.015)


def test_bootstrap_depends_on_its_seed_alone() -> None:
    first = st.bootstrap_interval(SLEEP_1, seed=3)
    assert first == st.bootstrap_interval(SLEEP_1, seed=3)
    assert first != st.bootstrap_interval(SLEEP_1, seed=4)
    constant = st.bootstrap_interval(np.full(4, 2.5))
    assert (constant.low, constant.high) == (2.5, 2.5)


# Effect sizes.


def test_effect_sizes() -> None:
    assert st.paired_effect_size(SLEEP_1, SLEEP_2).d == pytest.approx(-4.0621 / math.sqrt(10), abs=5e-5)
    # Differences of 2 in groups of deviation 2.
    a, b = np.array([3.0, 5.0, 7.0]), np.array([1.0, 3.0, 5.0])
    result = st.unpaired_effect_size(a, b)
    assert result.d == pytest.approx(1.0)
    assert result.g == pytest.approx(1 - 3 / (4 * 4 - 1), abs=5e-3)  # the usual approximation of the factor


def test_hedges_correction() -> None:
    """gamma(m/2) / (sqrt(m/2) gamma((m-1)/2)), Hedges (1981), for 2, 3 and 10 degrees of freedom."""
    root = math.sqrt(math.pi)
    assert st.hedges_correction(2) == pytest.approx(1 / root)
    assert st.hedges_correction(3) == pytest.approx(root / 2 / math.sqrt(1.5))
    assert st.hedges_correction(10) == pytest.approx(24 / (math.sqrt(5) * 105 / 16 * root))
    assert math.isnan(st.hedges_correction(1))


# Choice of the test.


def test_equal_differences_use_wilcoxon() -> None:
    """Two pairs with equal differences would give an infinite t without being evidence."""
    result = st.compare_paired(np.array([0.9, 0.8]), np.array([0.8, 0.7]), level=0.95)
    assert result.test.startswith("Wilcoxon")
    assert result.p == 0.5
    same = st.compare_paired(np.array([0.9, 0.8]), np.array([0.9, 0.8]), level=0.95)
    assert (same.test, same.p, same.difference) == ("paired t-test", 1.0, 0.0)


def test_classifiers_are_compared_on_discordant_predictions() -> None:
    a = np.array([True] * 30 + [False] * 10 + [True] * 40 + [False] * 20)
    b = np.array([False] * 30 + [True] * 10 + [True] * 40 + [False] * 20)
    result = st.compare_classifiers(a, b, level=0.95)
    assert result.n == 40
    assert result.statistic == pytest.approx((20 - 1) ** 2 / 40)
    assert result.difference == pytest.approx(0.2)
    assert result.effect[1] == pytest.approx(3.0)
    assert result.interval.low < 0.2 < result.interval.high
