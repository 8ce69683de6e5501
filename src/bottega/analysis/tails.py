"""Tails of the distributions that tests are read off: normal, t, chi-square, binomial.

By continued fractions on `math.lgamma`, because scipy would be a dependency for five functions. They agree with scipy to
1e-10 where tests look (up to some thousand degrees of freedom; beyond, the logarithm of gamma loses digits).
"""

from __future__ import annotations

import math
from collections.abc import Callable

TINY = 1e-300
"""In place of a zero that would be divided by."""
CLOSE = 1e-16
MOST_TERMS = 100_000


def normal_two_sided(z: float) -> float:
    """P(|Z| >= |z|)."""
    return math.erfc(abs(z) / math.sqrt(2))


def t_two_sided(t: float, df: float) -> float:
    """P(|T| >= |t|) of Student's t."""
    assert df > 0, df
    if math.isinf(t):
        return 0.0
    total = df + t * t
    return beta_share(df / 2, 0.5, df / total, t * t / total)


def t_quantile(p: float, df: float) -> float:
    """The t whose two-sided tail is p: 12.7062 of p 0.05 and one degree of freedom."""
    assert 0 < p <= 1, p
    low, high = 0.0, 1.0
    while t_two_sided(high, df) > p:
        low, high = high, 2 * high
    while True:  # halving ends where two numbers are neighbours
        middle = (low + high) / 2
        if middle in (low, high):
            return middle
        if t_two_sided(middle, df) > p:
            low = middle
        else:
            high = middle


def chi_square_tail(x: float, df: float) -> float:
    """P(X >= x) of chi-square."""
    assert df > 0, df
    return gamma_tail(df / 2, x / 2) if x > 0 else 1.0


def binomial_tail(k: int, n: int, p: float = 0.5) -> float:
    """P(X <= k) of n trials."""
    if k < 0:
        return 0.0
    return 1.0 if k >= n else beta_share(n - k, k + 1, 1 - p, p)


def beta_share(a: float, b: float, x: float, y: float) -> float:
    """The regularised incomplete beta function I_x(a, b). y is 1 - x, asked for because the caller knows its digits."""
    if x <= 0 or y <= 0:
        return 0.0 if x <= 0 else 1.0
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y)
    if x > (a + 1) / (a + b + 2):  # the fraction of the other side converges faster
        return 1 - math.exp(scale) / b * _beta_fraction(b, a, y)
    return math.exp(scale) / a * _beta_fraction(a, b, x)


def gamma_tail(a: float, x: float) -> float:
    """The regularised upper incomplete gamma function Q(a, x)."""
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x >= a + 1:
        return scale * _fraction(lambda i: i * (a - i), lambda i: x + 2 * i + 1 - a)
    term = total = 1 / a
    n = a
    while term > CLOSE * total:
        n += 1
        term *= x / n
        total += term
    return 1 - scale * total


def _beta_fraction(a: float, b: float, x: float) -> float:
    """1 / (1 + d1 / (1 + d2 / ...)), Abramowitz and Stegun 26.5.8."""

    def numerator(i: int) -> float:
        m = i // 2
        if i % 2:
            return -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        return m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))

    return _fraction(numerator, lambda i: 1.0)


def _fraction(numerator: Callable[[int], float], denominator: Callable[[int], float]) -> float:
    """1 / (b0 + a1 / (b1 + a2 / ...)) from the front, by the method of Lentz, so that it can end when it is exact."""
    value = denominator(0) or TINY
    above, below = value, 0.0
    for i in range(1, MOST_TERMS):
        a, b = numerator(i), denominator(i)
        below = 1 / ((b + a * below) or TINY)
        above = (b + a / above) or TINY
        change = above * below
        value *= change
        if abs(change - 1) <= CLOSE:
            break
    return 1 / value
