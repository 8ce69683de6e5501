"""`bottega compare`: test whether groups of runs differ, paired by the seeds, folds, samples or users that they share."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bottega.analysis import statistics
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
"""Number of pairs below which the p-value of a Wilcoxon test cannot be under 0.1."""
CLIPPED_MARK = "*"
DIRECTION_TEXT = {"max": ", larger is better", "min": ", smaller is better", None: ""}
ONE_RUN_KINDS = ("samples", "people")
"""What `n` counts if each group is a single run."""
MAX_VERDICTS = 10
"""Maximum number of verdicts written below a plot."""


def compare(
    group_names: Sequence[str], *, metric: str | None = None, split: str | None = None, alpha: float = 0.05
) -> dict[str, Any]:
    """Test every pair of groups and return the report as plain values; a difference is the later group minus the earlier.

    Runs of a group differ in seed or fold. p-values are adjusted by Holm's method. `split` compares the results of
    `bottega evaluate` on that split, None the evaluations during training.
    """
    if not 0 < alpha < 1:
        raise UsageError(f"--alpha {alpha:g}: expected a number between 0 and 1, such as 0.05")
    if len(group_names) < 2:
        raise UsageError(
            'give at least two groups: bottega compare A B, such as bottega compare "runs/a-s*" "runs/b-s*"'
        )
    report = _compare_groups(group_names, metric=metric, split=split, level=1 - alpha)
    adjusted_ps = statistics.holm_correction([pair["p"] for pair in report["pairs"]])
    for pair, p in zip(report["pairs"], adjusted_ps, strict=True):
        pair |= {"p_adjusted": p, **_conclude(pair, p, report, alpha=alpha, num_pairs=len(adjusted_ps))}
    if len(adjusted_ps) > 1:
        report["notes"].append("p is adjusted for the number of pairs by Holm's method; intervals are not")
    return {**report, "alpha": alpha, "level": 1 - alpha, "notes": list(dict.fromkeys(report["notes"]))}


def _compare_groups(names: Sequence[str], *, metric: str | None, split: str | None, level: float) -> dict[str, Any]:
    """Compare by what the groups have in common: people, samples, or seeds and folds."""
    if are_personalized_runs(names):
        return compare_by_people(names, metric=metric, split=split, level=level)
    groups = read_groups(names)
    best_metric = require_same_metric(groups)
    if all(len(group.members) == 1 for group in groups):
        return compare_by_predictions(groups, metric=metric, split=split, level=level)
    return _compare_by_values(
        groups, metric=metric or best_metric.metric, best_metric=best_metric, split=split, level=level
    )


def _compare_by_values(
    groups: list[Group], *, metric: str, best_metric: BestMetric, split: str | None, level: float
) -> dict[str, Any]:
    """Compare groups of seeds or folds by one number per run."""
    notes: list[str] = []
    for group in groups:
        if len(group.members) < 2:
            raise UsageError(f"{group.name} is a single run: {SEEDS_HINT}")
        for member in group.members[1:] if not group.num_folds else ():
            notes += check_same_data(group.members[0], member, metric=metric, split=split)
    if len({group.kind for group in groups}) > 1:
        fold_group = next(group.name for group in groups if group.num_folds)
        raise UsageError(
            f"{fold_group} contains folds and another group contains seeds, which vary for different reasons; compare "
            "groups of one kind"
        )
    values: dict[str, dict[int, float]] = {}
    for group in groups:
        values[group.label] = {}
        for key, member in group.members_by_key.items():
            if split is None:
                values[group.label][key] = read_best_value(member.path, metric, best_metric)
                continue
            values[group.label][key], has_split = read_result_value(member.path, metric, split)
            if not has_split:
                notes.append(f"results/metrics.json does not name its split; {split} is assumed")
    pairs = []
    for first, second in itertools.combinations(groups, 2):
        pairs.append(_test_pair(first, second, values, metric=metric, split=split, level=level, notes=notes))
    return {
        "metric": metric,
        "mode": metric_direction(metric, best_metric),
        "read_from": "metrics.jsonl" if split is None else f"results/metrics.json ({split})",
        "groups": [_describe_group(group, values[group.label], level=level) for group in groups],
        "pairs": pairs,
        "notes": notes,
    }


def _describe_group(group: Group, values: dict[int, float], *, level: float) -> dict[str, Any]:
    numbers = np.array(list(values.values()))
    interval = statistics.mean_confidence_interval(numbers, level=level, test_train_ratio=group.test_train_ratio or 0.0)
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


def _test_pair(
    first: Group,
    second: Group,
    values: dict[str, dict[int, float]],
    *,
    metric: str,
    split: str | None,
    level: float,
    notes: list[str],
) -> dict[str, Any]:
    """Test two groups in pairs by the folds or seeds that both have, or unpaired if they have no seed in common."""
    first_values, second_values, kind = values[first.label], values[second.label], first.kind
    shared_keys = [key for key in first_values if key in second_values]
    if len(shared_keys) == 1 or (first.num_folds and not shared_keys):
        raise UsageError(
            f"{first.name} and {second.name} have {len(shared_keys) or 'no'} {kind} in common, and a test needs 2 pairs or more; "
            f"give both the same {kind}s"
        )
    for key in shared_keys or (next(iter(first_values)),):
        partner = second.members_by_key[key] if shared_keys else second.members[0]
        notes += check_same_data(first.members_by_key[key], partner, metric=metric, split=split)
    if not shared_keys:
        result = statistics.compare_unpaired(
            *(np.array(list(side.values())) for side in (second_values, first_values)), level=level
        )
        if math.isinf(result.statistic):
            raise UsageError(
                f"{first.name} and {second.name} have no variance, so only a paired test applies; give both the same seeds"
            )
        why = (
            f"they have no seed in common, so there are no pairs, and the variances of {len(first_values)} and "
            f"{len(second_values)} runs may differ"
        )
        if min(len(first_values), len(second_values)) < FEW_PAIRS:
            notes.append(
                f"with {len(first_values)} and {len(second_values)} runs a test has little power; use at least {FEW_PAIRS} seeds each"
            )
        return describe_pair(first, second, result, why=why, paired_by=None)
    result = statistics.compare_paired(
        *(np.array([side[key] for key in shared_keys]) for side in (second_values, first_values)),
        level=level,
        test_train_ratio=first.test_train_ratio,
    )
    unpaired_keys = sorted(set(first_values) ^ set(second_values))
    if unpaired_keys:
        notes.append(
            f"{first.label} and {second.label}: left out, as only one of them has it: {kind} {', '.join(map(str, unpaired_keys))}"
        )
    if len(shared_keys) < FEW_PAIRS:
        power_note = f"with {len(shared_keys)} pairs a test has little power (the smallest possible Wilcoxon p is {2 / 2 ** len(shared_keys):g})"
        notes.append(f"{power_note}, and the t-test assumes normal differences")
    if result.test.startswith("Wilcoxon"):
        why = "all pairs differ by the same amount, so a t-test has no variance to divide by"
    elif first.num_folds:
        why = f"folds share training data, so the variance is scaled by 1/{len(shared_keys)} + 1/{first.num_folds - 1}, not by 1/{len(shared_keys)}"
    else:
        why = f"they have {len(shared_keys)} seeds in common, so runs of one seed are pairs"
    return describe_pair(first, second, result, why=why, paired_by=kind)


def _conclude(
    pair: dict[str, Any], p: float, report: dict[str, Any], *, alpha: float, num_pairs: int
) -> dict[str, Any]:
    """Return which group is better, if the test shows it, and a verdict that always names the test, n and p."""
    first, second, is_higher = pair["first"], pair["second"], pair["difference"] > 0
    if p >= alpha:
        outcome, better = "no difference shown", None
    elif report["mode"] is None:
        outcome, better = f"{second} is {'higher' if is_higher else 'lower'}", None
    else:
        better = second if is_higher == (report["mode"] == "max") else first
        outcome = f"{better} is better"
    holm = f" after Holm's correction for {num_pairs} pairs" if num_pairs > 1 else ""
    verdict = (
        f"{second} - {first}: {outcome} ({pair['test']}, n = {_format_count(pair, report)}, p = {_format_p(p)}{holm})"
    )
    return {"better": better, "outcome": outcome, "verdict": verdict}


def _format_count(pair: dict[str, Any], report: dict[str, Any]) -> str:
    """Format n; McNemar's test counts only the discordant samples, so the total is added."""
    if not pair["test"].startswith("McNemar"):
        return str(pair["n"])
    group = report["groups"][0]
    return f"{pair['n']:,} of {group['n']:,} {group['kind']} where only one is right"


def format_report(report: dict[str, Any]) -> str:
    """Format a report of `compare` for the terminal: a table of groups, a table of pairs, the reasons and the notes."""
    format_number, level = _make_number_formatter(report), _format_interval_title(report)
    lines = [f"{report['metric']}{DIRECTION_TEXT[report['mode']]}, from {report['read_from']}", ""]
    rows, is_clipped = [["group", "", "n", "mean", "deviation", level]], False
    for group in report["groups"]:
        deviation = "" if group["deviation"] is None else format_number(group["deviation"])
        n = f"{group['n']:,} {group['kind']}"
        span = _format_interval(group["interval"], format_number, metric=report["metric"])
        rows.append([group["label"], group["name"], n, format_number(group["mean"]), deviation, span])
        is_clipped = is_clipped or CLIPPED_MARK in span
    lines += [*format_table(rows, right=(2, 3, 4, 5)), ""]
    p_title = "p" if len(report["pairs"]) == 1 else "p (Holm)"
    rows = [["pair", "difference", level, "test", "n", p_title, "effect", ""]]
    for pair in report["pairs"]:
        effect = f"{pair['effect']['name']} {pair['effect']['size']:.2f}"
        difference, span = (
            f"{format_number(pair['difference'], '+')}",
            _format_interval(pair["interval"], format_number, "+"),
        )
        name = f"{pair['second']} - {pair['first']}"
        cells = [pair["test"], f"{pair['n']:,}", _format_p(pair["p_adjusted"]), effect, pair["outcome"]]
        rows.append([name, difference, span, *cells])
    lines += [*format_table(rows, right=(1, 2, 4, 5)), ""]
    for pair in report["pairs"]:
        name, ranks = f"{pair['second']} - {pair['first']}", pair["ranks"]
        wilcoxon = ""
        if ranks is not None and not pair["test"].startswith("Wilcoxon"):
            unadjusted = ", not adjusted" if len(report["pairs"]) > 1 else ""
            wilcoxon = f"; as a check, Wilcoxon's signed-rank test: p = {_format_p(ranks['p'])} ({ranks['method']}{unadjusted})"
        lines.append(f"{name}: {pair['test']}, because {pair['why']}{wilcoxon}")
        if pair["changed"]:
            lines.append(
                f"{name}: " + ", ".join(f"{key} {old} -> {new}" for key, (old, new) in pair["changed"].items())
            )
    clip_notes = (
        [f"{CLIPPED_MARK} the interval exceeds the range of the metric and is clipped; --json has it unclipped"]
        if is_clipped
        else []
    )
    return "\n".join([*lines, *(f"note: {note}" for note in (*report["notes"], *clip_notes))])


def _format_interval_title(report: dict[str, Any]) -> str:
    return f"{100 * report['level']:g} % interval"


def _format_p(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def _make_number_formatter(report: dict[str, Any]) -> Callable[..., str]:
    """Return a formatter with five significant digits of the largest mean, the same for all numbers so that they align."""
    largest = max(abs(group["mean"]) for group in report["groups"]) or 1.0
    decimals = min(max(0, 4 - math.floor(math.log10(largest))), 10)
    return lambda value, sign="": f"{value:{sign}.{decimals}f}"


def _format_interval(
    interval: dict[str, float], format_number: Callable[..., str], sign: str = "", metric: str = ""
) -> str:
    ends = [clip_to_bounds(interval[end], metric) for end in ("low", "high")]
    return " to ".join(f"{mark}{format_number(value, sign)}" for value, mark in ends)


def clip_to_bounds(value: float, metric: str) -> tuple[float, str]:
    """Clip an end of an interval to the range of the metric; return it with a mark if it was clipped.

    A t interval does not respect the range of a metric.
    """
    low, high = get_metric_bounds(metric)
    clipped = min(max(value, low), high)
    return clipped, CLIPPED_MARK if clipped != value else ""


def format_table(rows: list[list[str]], *, right: tuple[int, ...]) -> list[str]:
    """Return `rows` as lines of aligned columns; the columns `right` are aligned to the right."""
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
        subtitle=_format_plot_subtitle(report),
        conclusions=[pair["verdict"] for pair in report["pairs"][:MAX_VERDICTS]],
    )


def _format_plot_subtitle(report: dict[str, Any]) -> str:
    groups = report["groups"]
    if groups[0]["kind"] in ONE_RUN_KINDS:
        return f"mean over {groups[0]['n']:,} {groups[0]['kind']} with its {_format_interval_title(report)}"
    lines_text = ", lines join runs of one seed or fold" if len(groups) > 1 else ""
    return f"each dot is a run{lines_text}; next to it is the mean with its {_format_interval_title(report)}"
