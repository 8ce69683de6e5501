"""Statistics over the arms of a personalised evaluation: means with intervals, and paired tests over people.

A row holds the measures of one record in one arm. A user with several records counts once, with the mean over these records:
people are the independent samples, records of one person are not.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bottega.analysis import statistics
from bottega.core.noise import numpy_generator
from bottega.tasks.personalize.arms import ARMS

ALL_ARMS = (*ARMS, "picked", "shuffled")
TARGET_ARM = "target"
"""The image that the person chose, which is not generated; its scores are the ceiling of each measure."""
TESTED_PAIRS = (("none", "both"), ("keywords", "both"), ("shuffled", "both"), ("none", "keywords"), ("none", "soft"))
"""Pairs (first, second) that are tested; the difference is second minus first."""
MIN_PEOPLE = 5
"""Fewest people for a test: with four, Wilcoxon's smallest possible p is 0.125."""
LARGER_IS_BETTER = ("clip_preference", "clip_target", "clip_history", "ssim")
SMALLER_IS_BETTER = ("perceptual", "lpips")
ACCURACY_SUFFIX = "_accuracy"

Rows = Sequence[Mapping[str, Any]]


def list_measures(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the measures in `rows`, accuracies first."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [n for n in names if n.endswith(ACCURACY_SUFFIX)] + [
        n for n in names if n in (*LARGER_IS_BETTER, *SMALLER_IS_BETTER)
    ]


def get_measure_direction(measure: str) -> str | None:
    """Return "max" if larger values of a measure are better, "min" if smaller ones are, else None."""
    if measure in SMALLER_IS_BETTER:
        return "min"
    return "max" if measure.endswith(ACCURACY_SUFFIX) or measure in LARGER_IS_BETTER else None


def average_by_user(rows: Rows, arm: str, measure: str) -> dict[str, float]:
    """Return user -> mean of a measure over the user's records in one arm; users without a value are left out."""
    values: dict[str, list[float]] = {}
    for row in rows:
        value = row.get(measure) if row["arm"] == arm else None
        if value is not None and not math.isnan(value):  # NaN: no keywords, or no liked images, to compare with
            values.setdefault(str(row["user"]), []).append(float(value))
    # Sorted, because sums of floats and bootstrap samples depend on the order.
    return {user: float(np.mean(values[user])) for user in sorted(values)}


def summarise_arms(rows: Rows, *, level: float = 0.95) -> dict[str, dict[str, dict[str, float]]]:
    """Return arm -> measure -> mean, low and high (confidence interval) over people."""
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for arm in (*ALL_ARMS, TARGET_ARM):
        for measure in list_measures(rows):
            values = np.array(list(average_by_user(rows, arm, measure).values()))
            if len(values):
                interval = compute_interval(values, level=level)
                stats = {"mean": float(values.mean()), "low": interval.low, "high": interval.high}
                summary.setdefault(arm, {})[measure] = stats
    return summary


def compute_interval(values: np.ndarray, *, level: float) -> statistics.Interval:
    """Return a confidence interval of the mean: Wilson's for binary values, else a bootstrap over people.

    A bootstrap of 48 wrong answers would give an interval of width 0.
    """
    if are_binary([values]):
        return statistics.wilson_interval(int(values.sum()), len(values), level=level)
    return statistics.bootstrap_interval(values, level=level, method="percentile")


def compare_arms(
    rows: Rows, *, level: float = 0.95, pairs: Sequence[tuple[str, str]] = TESTED_PAIRS
) -> list[dict[str, Any]]:
    """Test each pair of arms by each measure, over the people in both; p is Holm-adjusted within a measure."""
    tests: list[dict[str, Any]] = []
    for measure in list_measures(rows):
        measure_tests = []
        arms = {
            arm: average_by_user(rows, arm, measure) for arm in dict.fromkeys(arm for pair in pairs for arm in pair)
        }
        is_binary = are_binary([np.array(list(values.values())) for values in arms.values()])
        for first, second in pairs:
            first_values, second_values = arms[first], arms[second]
            users = [user for user in first_values if user in second_values]
            if len(users) < MIN_PEOPLE:
                continue
            values = [np.array([by_user[user] for user in users]) for by_user in (second_values, first_values)]
            result = compare_users(*values, level=level, is_binary=is_binary)
            measure_tests.append(
                {"measure": measure, "first": first, "second": second, **_to_dict(result), "people": len(users)}
            )
        for test, p in zip(
            measure_tests, statistics.holm_correction([test["p"] for test in measure_tests]), strict=True
        ):
            tests.append({**test, "p_adjusted": p})
    return tests


def compare_users(second: np.ndarray, first: np.ndarray, *, level: float, is_binary: bool) -> statistics.Comparison:
    """Compare paired values, one per person: McNemar's test if binary, else a paired t-test with Wilcoxon's beside it."""
    if is_binary:
        return statistics.compare_classifiers(second > 0, first > 0, level=level)
    return statistics.compare_paired(second, first, level=level)


def are_binary(arrays: Iterable[np.ndarray]) -> bool:
    """Return whether all values of all arms are 0 or 1.

    Decide this once for a measure, not for each pair of arms: if its pairs had different tests, the larger difference could
    have the larger p.
    """
    return all(bool(np.isin(values, (0.0, 1.0)).all()) for values in arrays)


def _to_dict(comparison: statistics.Comparison) -> dict[str, Any]:
    interval = dataclasses.asdict(comparison.bootstrap["bca"])
    wilcoxon = comparison.ranks.p if comparison.ranks is not None else None
    extra = {"wilcoxon_p": wilcoxon} if wilcoxon is not None else {}
    return {
        "difference": comparison.difference,
        "interval": interval,
        "test": comparison.test,
        "p": comparison.p,
        **extra,
    }


def swap_histories(preferences: Sequence[tuple[str, ...]], *, seed: int) -> list[int] | None:
    """Return for each user the index of a user with other preferences; each index occurs once.

    None if more than half of the people have the same preferences, so that no such permutation exists. People are
    sorted by preferences and rotated by the size of the largest group, so that no user stays within their own group.
    """
    rng, groups = numpy_generator(seed, "strangers"), sorted(set(preferences))
    group_ranks = {groups[i]: rank for rank, i in enumerate(rng.permutation(len(groups)).tolist())}
    largest = max(Counter(preferences).values(), default=0)
    if not preferences or 2 * largest > len(preferences):
        return None
    order = sorted(rng.permutation(len(preferences)).tolist(), key=lambda user: group_ranks[preferences[user]])
    partners = dict(zip(order, order[largest:] + order[:largest], strict=True))
    return [partners[user] for user in range(len(preferences))]
