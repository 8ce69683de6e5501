"""Compare personalised runs, or two arms of one run, by the users that images were generated for.

An evaluation over people has several arms, so that a name may say which: `RUN:none` and `RUN:both` are two of one run.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bottega.analysis.compare_classifiers import describe_pair, describe_single_run
from bottega.analysis.compare_groups import Group, group_label, read_member, require_same_metric
from bottega.analysis.personalize_arms import (
    ALL_ARMS,
    MIN_PEOPLE,
    TARGET_ARM,
    are_binary,
    compare_users,
    mean_by_user,
    measure_direction,
    measure_interval,
    measure_names,
)
from bottega.core.errors import DataError, UsageError
from bottega.core.rundir import is_run

EVALUATION, PEOPLE = "evaluation", "people.jsonl"
DEFAULT_ARM = "both"
"""The arm of a run that names none."""
DEFAULT_METRICS = ("preference_accuracy", "drawn_preference_accuracy", "clip_preference")
"""The first of them that all have is what people are compared by."""


@dataclass(frozen=True)
class ArmEvaluation:
    """One arm of one run, person by person."""

    group: Group
    arm: str
    file: Path
    rows: tuple[dict[str, Any], ...]

    @property
    def targets_by_user(self) -> dict[str, list[str]]:
        """Person -> what they took, record by record: who is the same must have been asked for the same."""
        found: dict[str, list[str]] = {}
        for row in self.rows:
            if row["arm"] == self.arm:
                found.setdefault(str(row["user"]), []).append(f"{row.get('wish')} / {row.get('target')}")
        return found


def are_personalized_runs(names: Sequence[str]) -> bool:
    """Whether all are runs of the task personalize, each by itself or as one arm of it."""
    runs = [parse_arm(name)[0] for name in names]
    if not all(map(is_run, runs)):
        return False
    return all(read_member(run).recipe.task == "personalize" for run in runs)


def parse_arm(name: str) -> tuple[Path, str]:
    """RUN and the arm that is meant, which may be left out."""
    run, colon, arm = name.rpartition(":")
    if colon and not Path(name).exists():
        return Path(run), arm
    return Path(name), DEFAULT_ARM


def compare_by_people(names: Sequence[str], *, metric: str | None, split: str | None, level: float) -> dict[str, Any]:
    """Each name is a run, or RUN:ARM; all were evaluated with the same people, who are the pairs."""
    split = split or "validation"
    several = [_evaluated(name, group_label(i), split) for i, name in enumerate(names)]
    for one, other in itertools.combinations(several, 2):
        if one.arm == other.arm and one.file.resolve() == other.file.resolve():
            run = parse_arm(other.group.name)[0]
            raise UsageError(f"the arm {one.arm} of {run} is given twice; name two, such as {run}:none {run}:both")
    require_same_metric([one.group for one in several])
    _check_same_people(several)
    metric = _metric(several, metric)
    values = [mean_by_user(one.rows, one.arm, metric) for one in several]
    people = [user for user in values[0] if all(user in others for others in values)]
    if len(people) < MIN_PEOPLE:
        raise UsageError(
            f"{len(people)} people have {metric} in all of them, and with fewer than {MIN_PEOPLE} nothing can be told"
        )
    arrays = [np.array([side[user] for user in people]) for side in values]
    is_answers = are_binary(arrays)
    rows, pairs = [], []
    for one, numbers in zip(several, arrays, strict=True):
        interval = measure_interval(numbers, level=level)
        rows.append(describe_single_run(one.group, numbers, interval, kind="people"))
    for (one, first), (other, second) in itertools.combinations(zip(several, arrays, strict=True), 2):
        found = compare_users(second, first, level=level, is_binary=is_answers)
        why = f"both drew for the same {len(people)} people, who are the pairs"
        why += f"; for {found.n} of them just one is right" if is_answers else ""
        pairs.append(describe_pair(one.group, other.group, found, why=why, paired_by="user"))
    notes = ["one run each: this tells what was drawn apart, not two ways of training; for these, give seeds"]
    if len({one.group.members[0].path.resolve() for one in several}) == 1:
        notes = []
    left_out = max(len(one.targets_by_user) for one in several) - len(people)
    if left_out:
        notes.append(f"{left_out} people have no {metric} in one of them and are left out")
    read_from = f"{EVALUATION}/{split}/{PEOPLE}"
    return {
        "metric": metric,
        "mode": measure_direction(metric),
        "read_from": read_from,
        "groups": rows,
        "pairs": pairs,
        "notes": notes,
    }


def _evaluated(name: str, label: str, split: str) -> ArmEvaluation:
    run, arm = parse_arm(name)
    file = run / EVALUATION / split / PEOPLE
    again = f"bottega evaluate {run}{' --split test' if split == 'test' else ''}"
    if not file.is_file():
        raise UsageError(f"{run} was not evaluated over the people of {split}; say {again} first")
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            row = json.loads(line)
            row["user"], row["arm"]
        except (ValueError, KeyError, TypeError) as error:
            said = f"{type(error).__name__}: expected user, arm and measures; write it again: {again}"
            raise DataError(f"{file}:{number}: {said}") from None
        wrong = next((name for name in measure_names([row]) if not _is_measured(row[name])), None)
        if wrong is not None:
            said = f"{wrong} is {json.dumps(row[wrong])} and no number; write it again: {again}"
            raise DataError(f"{file}:{number}: {said}")
        rows.append(row)
    arms = [one for one in (*ALL_ARMS, TARGET_ARM) if any(row["arm"] == one for row in rows)]
    if arm not in arms:
        raise UsageError(f"{name}: {file} has no arm {arm!r}; it has {', '.join(arms) or 'none: it is empty'}")
    return ArmEvaluation(Group(label, name, (read_member(run),), None), arm, file, tuple(rows))


def _check_same_people(several: Sequence[ArmEvaluation]) -> None:
    mine = several[0].targets_by_user
    for other in several[1:]:
        theirs = other.targets_by_user
        every = {**mine, **theirs}
        differing = [user for user in every if mine.get(user) != theirs.get(user)]
        if differing:
            raise UsageError(
                f"{several[0].group.name} and {other.group.name} drew for different people or wishes, {len(differing):,} of "
                f"{len(every):,}, the first {differing[0]!r}; evaluate both on the same data with the same --count"
            )


def _metric(several: Sequence[ArmEvaluation], wanted: str | None) -> str:
    known = [
        name
        for name in measure_names(several[0].rows)
        if all(any(_is_number(v) for v in mean_by_user(one.rows, one.arm, name).values()) for one in several)
    ]
    if wanted is None:
        wanted = next((name for name in DEFAULT_METRICS if name in known), known[0] if known else "")
    if wanted not in known:
        raise UsageError(f"--metric {wanted}: is not in all of them; it can be {', '.join(known) or 'nothing'}")
    return wanted


def _is_measured(value: Any) -> bool:
    """A number, or null where there was nothing to measure."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and not math.isinf(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
