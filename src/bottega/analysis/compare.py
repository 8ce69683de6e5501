"""`bottega compare`: whether groups of runs differ, by the test that fits what they share, in words and as a picture."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bottega.analysis import statistics as st
from bottega.analysis.compare_classifiers import SEEDS_HINT, compare_by_predictions, describe_pair
from bottega.analysis.compare_groups import (
    Group,
    check_same_data,
    metric_direction,
    read_best_value,
    read_groups,
    read_result_value,
    require_same_metric,
)
from bottega.analysis.compare_people import are_personalized_runs, compare_by_people
from bottega.config.metrics import get_metric_bounds
from bottega.core.errors import UsageError
from bottega.core.trainer import BestMetric
from bottega.plots.comparison import plot_groups

FEW_PAIRS = 5
"""Pairs below which no difference has a Wilcoxon p under 0.1, however clear it is."""
CLIPPED_MARK = "*"
DIRECTION_TEXT = {"max": ", larger is better", "min": ", smaller is better", None: ""}
ONE_RUN_KINDS = ("samples", "people")
"""What is counted where each group is a single run."""
MAX_VERDICTS = 10
"""Verdicts written below a plot."""


def compare(
    group_names: Sequence[str], *, metric: str | None = None, split: str | None = None, alpha: float = 0.05
) -> dict[str, Any]:
    """All that can be said of these groups, as plain values. Differences are the later group minus the earlier."""
    if not 0 < alpha < 1:
        raise UsageError(f"--alpha {alpha:g}: expected a number between 0 and 1, such as 0.05")
    if len(group_names) < 2:
        raise UsageError('say what to compare: bottega compare A B, such as bottega compare "runs/a-s*" "runs/b-s*"')
    report = _report(group_names, metric=metric, split=split, level=1 - alpha)
    adjusted = st.holm_correction([pair["p"] for pair in report["pairs"]])
    for pair, p in zip(report["pairs"], adjusted, strict=True):
        pair |= {"p_adjusted": p, **_judged(pair, p, report, alpha=alpha, num_pairs=len(adjusted))}
    if len(adjusted) > 1:
        report["notes"].append("p is adjusted for the number of pairs by Holm's method; intervals are not")
    return {**report, "alpha": alpha, "level": 1 - alpha, "notes": list(dict.fromkeys(report["notes"]))}


def _report(names: Sequence[str], *, metric: str | None, split: str | None, level: float) -> dict[str, Any]:
    """By what the groups have in common: people, samples, or seeds and folds."""
    if are_personalized_runs(names):
        return compare_by_people(names, metric=metric, split=split, level=level)
    groups = read_groups(names)
    goal = require_same_metric(groups)
    if all(len(group.members) == 1 for group in groups):
        return compare_by_predictions(groups, metric=metric, split=split, level=level)
    return _by_values(groups, metric=metric or goal.metric, goal=goal, split=split, level=level)


def _by_values(
    groups: list[Group], *, metric: str, goal: BestMetric, split: str | None, level: float
) -> dict[str, Any]:
    """Groups of seeds or of folds, by one number a run."""
    notes: list[str] = []
    for group in groups:
        if len(group.members) < 2:
            raise UsageError(f"{group.name} is a single run: {SEEDS_HINT}")
        for member in group.members[1:] if not group.num_folds else ():
            notes += check_same_data(group.members[0], member, metric=metric, split=split)
    if len({group.kind for group in groups}) > 1:
        folds = next(group.name for group in groups if group.num_folds)
        raise UsageError(f"{folds} is folds and others are seeds, which vary for different reasons; compare one kind")
    values: dict[str, dict[int, float]] = {}
    for group in groups:
        values[group.label] = {}
        for key, member in group.members_by_key.items():
            if split is None:
                values[group.label][key] = read_best_value(member.path, metric, goal)
                continue
            values[group.label][key], is_said = read_result_value(member.path, metric, split)
            if not is_said:
                notes.append(f"results/metrics.json does not say of which split it is; it is taken for {split}")
    pairs = []
    for one, other in itertools.combinations(groups, 2):
        pairs.append(_tested(one, other, values, metric=metric, split=split, level=level, notes=notes))
    return {
        "metric": metric,
        "mode": metric_direction(metric, goal),
        "read_from": "metrics.jsonl" if split is None else f"results/metrics.json ({split})",
        "groups": [_described(group, values[group.label], level=level) for group in groups],
        "pairs": pairs,
        "notes": notes,
    }


def _described(group: Group, values: dict[int, float], *, level: float) -> dict[str, Any]:
    numbers = np.array(list(values.values()))
    interval = st.mean_confidence_interval(numbers, level=level, test_train_ratio=group.test_train_ratio or 0.0)
    return {
        "label": group.label,
        "name": group.name,
        "kind": f"{group.kind}s",
        "n": len(numbers),
        "mean": float(numbers.mean()),
        "deviation": float(numbers.std(ddof=1)),
        "interval": dataclasses.asdict(interval),
        "runs": [
            {"run": str(member.path), "seed": member.recipe.seed, "fold": member.fold, "value": values[key]}
            for key, member in group.members_by_key.items()
        ],
    }


def _tested(
    one: Group,
    other: Group,
    values: dict[str, dict[int, float]],
    *,
    metric: str,
    split: str | None,
    level: float,
    notes: list[str],
) -> dict[str, Any]:
    """In pairs by the folds or seeds that both have; seeds may also have none in common."""
    first, second, kind = values[one.label], values[other.label], one.kind
    shared = [key for key in first if key in second]
    if len(shared) == 1 or (one.num_folds and not shared):
        raise UsageError(
            f"{one.name} and {other.name} have {len(shared) or 'no'} {kind} in common, which makes fewer than 2 pairs; give "
            f"both the same {kind}s"
        )
    for key in shared or (next(iter(first)),):
        theirs = other.members_by_key[key] if shared else other.members[0]
        notes += check_same_data(one.members_by_key[key], theirs, metric=metric, split=split)
    if not shared:
        found = st.compare_unpaired(*(np.array(list(side.values())) for side in (second, first)), level=level)
        if math.isinf(found.statistic):
            raise UsageError(
                f"{one.name} and {other.name} do not vary at all; only pairs can tell: give both the same seeds"
            )
        why = f"they have no seed in common, so there are no pairs, and {len(first)} and {len(second)} runs may vary unlike"
        if min(len(first), len(second)) < FEW_PAIRS:
            notes.append(
                f"with {len(first)} and {len(second)} runs a test can hardly find anything; {FEW_PAIRS} seeds each are few"
            )
        return describe_pair(one, other, found, why=why, paired_by=None)
    found = st.compare_paired(
        *(np.array([side[key] for key in shared]) for side in (second, first)),
        level=level,
        test_train_ratio=one.test_train_ratio,
    )
    alone = sorted(set(first) ^ set(second))
    if alone:
        notes.append(
            f"{one.label} and {other.label}: {kind} {', '.join(map(str, alone))} is in one of them only and left out"
        )
    if len(shared) < FEW_PAIRS:
        few = f"with {len(shared)} pairs a test can hardly find anything (Wilcoxon's smallest possible p is {2 / 2 ** len(shared):g})"
        notes.append(f"{few}, and what t finds rests on differences being normal")
    if found.test.startswith("Wilcoxon"):
        why = "all pairs differ by the same amount, so that t has no scale"
    elif one.num_folds:
        why = f"folds share training data, so that the variance counts (1/{len(shared)} + 1/{one.num_folds - 1}), not 1/{len(shared)}"
    else:
        why = f"both have {len(shared)} seeds in common, so runs of one seed are pairs"
    return describe_pair(one, other, found, why=why, paired_by=kind)


def _judged(pair: dict[str, Any], p: float, report: dict[str, Any], *, alpha: float, num_pairs: int) -> dict[str, Any]:
    """Who is better, if that can be told; the verdict is never without test, n and p."""
    first, second, is_higher = pair["first"], pair["second"], pair["difference"] > 0
    if p >= alpha:
        outcome, better = "no difference shown", None
    elif report["mode"] is None:
        outcome, better = f"{second} is {'higher' if is_higher else 'lower'}", None
    else:
        better = second if is_higher == (report["mode"] == "max") else first
        outcome = f"{better} is better"
    holm = f" after Holm's correction for {num_pairs} pairs" if num_pairs > 1 else ""
    verdict = f"{second} - {first}: {outcome} ({pair['test']}, n = {_counted(pair, report)}, p = {_p(p)}{holm})"
    return {"better": better, "outcome": outcome, "verdict": verdict}


def _counted(pair: dict[str, Any], report: dict[str, Any]) -> str:
    """McNemar's n is not of all who were asked, and alone would look like a mistake."""
    if not pair["test"].startswith("McNemar"):
        return str(pair["n"])
    everybody = report["groups"][0]
    return f"{pair['n']:,} of {everybody['n']:,} {everybody['kind']} where just one is right"


# For people.


def format_report(report: dict[str, Any]) -> str:
    number, level = _format(report), _level(report)
    lines = [f"{report['metric']}{DIRECTION_TEXT[report['mode']]}, from {report['read_from']}", ""]
    rows, is_cut = [["group", "", "n", "mean", "deviation", level]], False
    for group in report["groups"]:
        deviation = "" if group["deviation"] is None else number(group["deviation"])
        n = f"{group['n']:,} {group['kind']}"
        span = _span(group["interval"], number, metric=report["metric"])
        rows.append([group["label"], group["name"], n, number(group["mean"]), deviation, span])
        is_cut = is_cut or CLIPPED_MARK in span
    lines += [*format_table(rows, right=(2, 3, 4, 5)), ""]
    p_title = "p" if len(report["pairs"]) == 1 else "p (Holm)"
    rows = [["pair", "difference", level, "test", "n", p_title, "effect", ""]]
    for pair in report["pairs"]:
        effect = f"{pair['effect']['name']} {pair['effect']['size']:.2f}"
        difference, span = f"{number(pair['difference'], '+')}", _span(pair["interval"], number, "+")
        name = f"{pair['second']} - {pair['first']}"
        told = [pair["test"], f"{pair['n']:,}", _p(pair["p_adjusted"]), effect, pair["outcome"]]
        rows.append([name, difference, span, *told])
    lines += [*format_table(rows, right=(1, 2, 4, 5)), ""]
    for pair in report["pairs"]:
        name, ranks = f"{pair['second']} - {pair['first']}", pair["ranks"]
        second = ""
        if ranks is not None and not pair["test"].startswith("Wilcoxon"):
            plain = ", not adjusted" if len(report["pairs"]) > 1 else ""
            second = f"; for a second opinion, Wilcoxon's signed ranks: p = {_p(ranks['p'])} ({ranks['method']}{plain})"
        lines.append(f"{name}: {pair['test']}, because {pair['why']}{second}")
        if pair["changed"]:
            lines.append(
                f"{name}: " + ", ".join(f"{key} {old} -> {new}" for key, (old, new) in pair["changed"].items())
            )
    cut = (
        [f"{CLIPPED_MARK} the interval goes beyond what the metric can be; --json has it as it was computed"]
        if is_cut
        else []
    )
    return "\n".join([*lines, *(f"note: {note}" for note in (*report["notes"], *cut))])


def _level(report: dict[str, Any]) -> str:
    return f"{100 * report['level']:g} % interval"


def _p(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def _format(report: dict[str, Any]) -> Callable[..., str]:
    """Five digits of the largest mean, for all numbers alike, so that they stand under each other."""
    largest = max(abs(group["mean"]) for group in report["groups"]) or 1.0
    decimals = min(max(0, 4 - math.floor(math.log10(largest))), 10)
    return lambda value, sign="": f"{value:{sign}.{decimals}f}"


def _span(interval: dict[str, float], number: Callable[..., str], sign: str = "", metric: str = "") -> str:
    ends = [clip_to_bounds(interval[end], metric) for end in ("low", "high")]
    return " to ".join(f"{mark}{number(value, sign)}" for value, mark in ends)


def clip_to_bounds(value: float, metric: str) -> tuple[float, str]:
    """An end of an interval as far as the metric goes, and a sign where that is not the whole way: an interval of t knows
    nothing of what a metric can be."""
    least, most = get_metric_bounds(metric)
    cut = min(max(value, least), most)
    return cut, CLIPPED_MARK if cut != value else ""


def format_table(rows: list[list[str]], *, right: tuple[int, ...]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = [
        [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    return ["  ".join(row).rstrip() for row in cells]


def plot_comparison(report: dict[str, Any], path: Path) -> None:
    """Plot every run as a dot, beside them the mean and interval of the group; lines join the runs of one seed or fold.

    For single runs the mean over samples or people is plotted alone. A single group is plotted without conclusions.
    """
    groups = []
    for group in report["groups"]:
        key = "fold" if group["kind"] == "folds" else "seed"
        points = {} if group["kind"] in ONE_RUN_KINDS else {run[key]: run["value"] for run in group["runs"]}
        groups.append({**group, "points": points})
    ends = [
        [clip_to_bounds(group["interval"][end], report["metric"])[0] for end in ("low", "high")] for group in groups
    ]
    plot_groups(
        groups,
        [(low, high) for low, high in ends],
        path,
        title=f"{report['metric']}{DIRECTION_TEXT[report['mode']]}",
        subtitle=_plot_subtitle(report),
        conclusions=[pair["verdict"] for pair in report["pairs"][:MAX_VERDICTS]],
    )


def _plot_subtitle(report: dict[str, Any]) -> str:
    groups = report["groups"]
    if groups[0]["kind"] in ONE_RUN_KINDS:
        return f"mean over {groups[0]['n']:,} {groups[0]['kind']} with its {_level(report)}"
    joined = ", lines join runs of one seed or fold" if len(groups) > 1 else ""
    return f"each dot is a run{joined}; beside it the mean with its {_level(report)}"
