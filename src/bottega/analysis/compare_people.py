"""Compare personalised runs, or two arms of one run, by the users that images were generated for.

An evaluation over people has several arms; `RUN:ARM` selects one, such as `RUN:none`.
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
    average_by_user,
    compare_users,
    compute_interval,
    get_measure_direction,
    list_measures,
)
from bottega.core.errors import DataError, UsageError
from bottega.core.rundir import is_run

EVALUATION_FOLDER, PEOPLE_FILE = "evaluation", "people.jsonl"
DEFAULT_ARM = "both"
"""The arm that is used if the name of a run does not select one."""
DEFAULT_METRICS = ("preference_accuracy", "drawn_preference_accuracy", "clip_preference")
"""The default metric is the first of these that all evaluations have."""


@dataclass(frozen=True)
class ArmEvaluation:
    """The rows of one run's evaluation, and the arm that is compared."""

    group: Group
    arm: str
    file: Path
    rows: tuple[dict[str, Any], ...]

    @property
    def targets_by_user(self) -> dict[str, list[str]]:
        """User -> wish and target of each record; these must be the same in all evaluations that are compared."""
        targets: dict[str, list[str]] = {}
        for row in self.rows:
            if row["arm"] == self.arm:
                targets.setdefault(str(row["user"]), []).append(f"{row.get('wish')} / {row.get('target')}")
        return targets


def are_personalized_runs(names: Sequence[str]) -> bool:
    """Return whether all names are runs of the task personalize, with or without an arm."""
    runs = [parse_arm(name)[0] for name in names]
    if not all(map(is_run, runs)):
        return False
    return all(read_member(run).recipe.task == "personalize" for run in runs)


def parse_arm(name: str) -> tuple[Path, str]:
    """Split RUN:ARM into the run and the arm, which is `DEFAULT_ARM` if left out."""
    run, colon, arm = name.rpartition(":")
    if colon and not Path(name).exists():
        return Path(run), arm
    return Path(name), DEFAULT_ARM


def compare_by_people(names: Sequence[str], *, metric: str | None, split: str | None, level: float) -> dict[str, Any]:
    """Compare evaluations of the same people, paired by person; each name is RUN or RUN:ARM."""
    split = split or "validation"
    evaluations = [_read_evaluation(name, group_label(i), split) for i, name in enumerate(names)]
    for evaluation, other in itertools.combinations(evaluations, 2):
        if evaluation.arm == other.arm and evaluation.file.resolve() == other.file.resolve():
            run = parse_arm(other.group.name)[0]
            raise UsageError(
                f"the arm {evaluation.arm} of {run} is given twice; give two different arms, such as {run}:none {run}:both"
            )
    require_same_metric([evaluation.group for evaluation in evaluations])
    _check_same_people(evaluations)
    metric = _choose_metric(evaluations, metric)
    values = [average_by_user(evaluation.rows, evaluation.arm, metric) for evaluation in evaluations]
    users = [user for user in values[0] if all(user in by_user for by_user in values)]
    if len(users) < MIN_PEOPLE:
        raise UsageError(
            f"only {len(users)} users have {metric} in all evaluations, fewer than {MIN_PEOPLE}; evaluate more with --count"
        )
    arrays = [np.array([by_user[user] for user in users]) for by_user in values]
    is_binary = are_binary(arrays)
    rows, pairs = [], []
    for evaluation, array in zip(evaluations, arrays, strict=True):
        interval = compute_interval(array, level=level)
        rows.append(describe_single_run(evaluation.group, array, interval, kind="people"))
    for (evaluation, first), (other, second) in itertools.combinations(zip(evaluations, arrays, strict=True), 2):
        comparison = compare_users(second, first, level=level, is_binary=is_binary)
        why = f"both generated images for the same {len(users)} users, who are the pairs"
        why += f"; for {comparison.n} of them just one is right" if is_binary else ""
        pairs.append(describe_pair(evaluation.group, other.group, comparison, why=why, paired_by="user"))
    notes = [
        "one run each: this compares the generated images, not two ways of training; to compare those, give several seeds"
    ]
    if len({evaluation.group.members[0].path.resolve() for evaluation in evaluations}) == 1:
        notes = []
    num_left_out = max(len(evaluation.targets_by_user) for evaluation in evaluations) - len(users)
    if num_left_out:
        notes.append(f"{num_left_out} users have no {metric} in some evaluation and are left out")
    read_from = f"{EVALUATION_FOLDER}/{split}/{PEOPLE_FILE}"
    return {
        "metric": metric,
        "mode": get_measure_direction(metric),
        "read_from": read_from,
        "groups": rows,
        "pairs": pairs,
        "notes": notes,
    }


def _read_evaluation(name: str, label: str, split: str) -> ArmEvaluation:
    run, arm = parse_arm(name)
    file = run / EVALUATION_FOLDER / split / PEOPLE_FILE
    command = f"bottega evaluate {run}{' --split test' if split == 'test' else ''}"
    if not file.is_file():
        raise UsageError(f"{run} has no evaluation over the users of {split}; run {command} first")
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            row = json.loads(line)
            row["user"], row["arm"]
        except (ValueError, KeyError, TypeError) as error:
            problem = f"{type(error).__name__}: expected user, arm and measures; write the file again with {command}"
            raise DataError(f"{file}:{number}: {problem}") from None
        bad_measure = next((name for name in list_measures([row]) if not _is_measured(row[name])), None)
        if bad_measure is not None:
            problem = (
                f"{bad_measure} is {json.dumps(row[bad_measure])}, not a number; write the file again with {command}"
            )
            raise DataError(f"{file}:{number}: {problem}")
        rows.append(row)
    arms = [a for a in (*ALL_ARMS, TARGET_ARM) if any(row["arm"] == a for row in rows)]
    if arm not in arms:
        raise UsageError(f"{name}: {file} has no arm {arm!r}; it has {', '.join(arms) or 'none: it is empty'}")
    return ArmEvaluation(Group(label, name, (read_member(run),), None), arm, file, tuple(rows))


def _check_same_people(evaluations: Sequence[ArmEvaluation]) -> None:
    first_targets = evaluations[0].targets_by_user
    for other in evaluations[1:]:
        other_targets = other.targets_by_user
        users = {**first_targets, **other_targets}
        differing_users = [user for user in users if first_targets.get(user) != other_targets.get(user)]
        if differing_users:
            raise UsageError(
                f"{evaluations[0].group.name} and {other.group.name} were evaluated on different users or wishes, "
                f"{len(differing_users):,} of {len(users):,}, the first {differing_users[0]!r}; evaluate both on the same data with the same --count"
            )


def _choose_metric(evaluations: Sequence[ArmEvaluation], metric: str | None) -> str:
    available = [
        name
        for name in list_measures(evaluations[0].rows)
        if all(
            any(_is_number(v) for v in average_by_user(evaluation.rows, evaluation.arm, name).values())
            for evaluation in evaluations
        )
    ]
    if metric is None:
        metric = next((name for name in DEFAULT_METRICS if name in available), available[0] if available else "")
    if metric not in available:
        raise UsageError(
            f"--metric {metric}: is not measured in all evaluations; choose from {', '.join(available) or 'none'}"
        )
    return metric


def _is_measured(value: Any) -> bool:
    """Return whether a value is a number, or null if there was nothing to measure."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and not math.isinf(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
