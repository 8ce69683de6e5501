"""The arms of a personalised run beside each other: means with intervals, and tests of whether they differ over people.

A row is a person and an arm. Where somebody has several records their mean counts once: people are what was drawn at
random, and records of one person are no second person.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bottega.analysis import statistics as st
from bottega.core.noise import numpy_generator
from bottega.tasks.personalize.arms import ARMS

ALL_ARMS = (*ARMS, "picked", "shuffled")
TARGET_ARM = "target"
"""Not drawn: the picture that the person did take, and so what the instruments read at their best."""
TESTED_PAIRS = (("none", "both"), ("keywords", "both"), ("shuffled", "both"), ("none", "keywords"), ("none", "soft"))
"""Tested as the second less the first."""
MIN_PEOPLE = 5
"""People below which no test can find anything; see Wilcoxon's smallest p."""
LARGER_IS_BETTER = ("clip_preference", "clip_target", "clip_history", "ssim")
SMALLER_IS_BETTER = ("perceptual", "lpips")
ACCURACY_SUFFIX = "_accuracy"

Rows = Sequence[Mapping[str, Any]]


def measure_names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of what was measured, accuracies first."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [n for n in names if n.endswith(ACCURACY_SUFFIX)] + [
        n for n in names if n in (*LARGER_IS_BETTER, *SMALLER_IS_BETTER)
    ]


def measure_direction(measure: str) -> str | None:
    if measure in SMALLER_IS_BETTER:
        return "min"
    return "max" if measure.endswith(ACCURACY_SUFFIX) or measure in LARGER_IS_BETTER else None


def mean_by_user(rows: Rows, arm: str, measure: str) -> dict[str, float]:
    """Person -> the mean over their records of what was measured; those of whom nothing was measured are left out."""
    values: dict[str, list[float]] = {}
    for row in rows:
        value = row.get(measure) if row["arm"] == arm else None
        if value is not None and not math.isnan(value):  # nothing to be near to: no keywords, or no liked pictures
            values.setdefault(str(row["user"]), []).append(float(value))
    # In one order, whichever the rows had: sums of floats, and so what is drawn again from them, depend on it.
    return {user: float(np.mean(values[user])) for user in sorted(values)}


def summarise_arms(rows: Rows, *, level: float = 0.95) -> dict[str, dict[str, dict[str, float]]]:
    """Arm -> measure -> mean, low, high over people."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for arm in (*ALL_ARMS, TARGET_ARM):
        for measure in measure_names(rows):
            values = np.array(list(mean_by_user(rows, arm, measure).values()))
            if len(values):
                interval = measure_interval(values, level=level)
                spread = {"mean": float(values.mean()), "low": interval.low, "high": interval.high}
                found.setdefault(arm, {})[measure] = spread
    return found


def measure_interval(values: np.ndarray, *, level: float) -> st.Interval:
    """Of a share Wilson's, since a bootstrap of 48 wrong answers calls 0 certain; else a bootstrap over people."""
    if are_binary([values]):
        return st.wilson_interval(int(values.sum()), len(values), level=level)
    return st.bootstrap_interval(values, level=level, method="percentile")


def compare_arms(
    rows: Rows, *, level: float = 0.95, pairs: Sequence[tuple[str, str]] = TESTED_PAIRS
) -> list[dict[str, Any]]:
    """All pairs of arms by all measures, over the people that both have. p is adjusted within a measure."""
    found: list[dict[str, Any]] = []
    for measure in measure_names(rows):
        of_this = []
        arms = {arm: mean_by_user(rows, arm, measure) for arm in dict.fromkeys(arm for pair in pairs for arm in pair)}
        is_answers = are_binary([np.array(list(values.values())) for values in arms.values()])
        for first, second in pairs:
            one, other = arms[first], arms[second]
            people = [user for user in one if user in other]
            if len(people) < MIN_PEOPLE:
                continue
            values = [np.array([side[user] for user in people]) for side in (other, one)]
            result = compare_users(*values, level=level, is_binary=is_answers)
            of_this.append(
                {"measure": measure, "first": first, "second": second, **_plain(result), "people": len(people)}
            )
        for test, p in zip(of_this, st.holm_correction([test["p"] for test in of_this]), strict=True):
            found.append({**test, "p_adjusted": p})
    return found


def compare_users(second: np.ndarray, first: np.ndarray, *, level: float, is_binary: bool) -> st.Comparison:
    """Right and wrong answers by McNemar, all else by a paired t with Wilcoxon beside it."""
    if is_binary:
        return st.compare_classifiers(second > 0, first > 0, level=level)
    return st.compare_paired(second, first, level=level)


def are_binary(several: Iterable[np.ndarray]) -> bool:
    """Whether all people of all arms are right or wrong. Asked of a measure once: of two tests beside each other, the
    larger difference may have the larger p."""
    return all(bool(np.isin(values, (0.0, 1.0)).all()) for values in several)


def _plain(found: st.Comparison) -> dict[str, Any]:
    interval = dataclasses.asdict(found.bootstrap["bca"])
    wilcoxon = found.ranks.p if found.ranks is not None else None
    beside = {"wilcoxon_p": wilcoxon} if wilcoxon is not None else {}
    return {"difference": found.difference, "interval": interval, "test": found.test, "p": found.p, **beside}


def swap_histories(preferences: Sequence[tuple[str, ...]], *, seed: int) -> list[int] | None:
    """Whose history each person is given instead: everybody's once, and of nobody who likes the same.

    None where that cannot be: more than half like the same. Sorted by taste and turned by the size of the largest group,
    nobody meets their own.
    """
    rng, kinds = numpy_generator(seed, "strangers"), sorted(set(preferences))
    places = {kinds[i]: at for at, i in enumerate(rng.permutation(len(kinds)).tolist())}
    largest = max(Counter(preferences).values(), default=0)
    if not preferences or 2 * largest > len(preferences):
        return None
    order = sorted(rng.permutation(len(preferences)).tolist(), key=lambda person: places[preferences[person]])
    given = dict(zip(order, order[largest:] + order[:largest], strict=True))
    return [given[person] for person in range(len(preferences))]
