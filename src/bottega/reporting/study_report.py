"""What the page shows of a study (`bottega tune`) and of a cross-validation, from study.json and crossval.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bottega.core.errors import UsageError
from bottega.reporting.evaluations import UNKNOWN_FORMAT, format_p
from bottega.reporting.tables import Table, format_number, format_seconds
from bottega.run_files.configuration import format_value
from bottega.run_files.logs import is_number
from bottega.run_files.reading import read_json_object

MAX_TRIALS = 300
"""Trials in the table; the charts show all."""


@dataclass
class FolderReport:
    """A study or a cross-validation on the page."""

    path: Path
    kind: str
    title: str
    subtitle: str
    tables: list[Table] = field(default_factory=list)
    charts: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_study(folder: Path) -> FolderReport:
    """Read the study.json of a study."""
    return _read_folder(folder, "study.json", _build_study, command="bottega tune")


def read_crossval(folder: Path) -> FolderReport:
    """Read the crossval.json of a cross-validation."""
    return _read_folder(folder, "crossval.json", _build_crossval, command="bottega crossval")


def _read_folder(
    folder: Path, name: str, build: Callable[[Path, dict[str, Any]], FolderReport], *, command: str
) -> FolderReport:
    """Build the report of a folder from its JSON file; raise UsageError if the file cannot be used."""
    notes: list[str] = []
    fields = read_json_object(folder / name, folder, notes)
    try:
        return build(folder, fields)
    except UNKNOWN_FORMAT:
        reason = notes[0] if notes else f"{name} is missing or has an unknown format; run {command} again to write it"
        raise UsageError(f"{folder}: {reason}") from None


def _build_study(folder: Path, fields: dict[str, Any]) -> FolderReport:
    metrics = [(metric["name"], metric["mode"]) for metric in fields["metrics"]]
    trials = fields.get("trials") or []
    counts = ", ".join(f"{number} {state}" for state, number in (fields.get("counts") or {}).items() if number)
    report = FolderReport(
        folder,
        "study",
        f"Study {fields['study']}",
        f"{fields['task']}, {fields['method']} over {len(fields['space'])} keys of {fields['recipe']}: "
        f"{len(trials)} trials ({counts})",
        notes=[str(fields["summary"])] if fields.get("summary") else [],
    )
    keys = list(fields["space"])
    # An infinite value is null in JSON; such a trial has no place in an order.
    finished = [trial for trial in trials if trial.get("values") and all(map(is_number, trial["values"]))]
    mode = metrics[0][1]
    order = sorted(finished, key=lambda trial: trial["values"][0], reverse=mode == "max")
    unfinished = [trial for trial in trials if trial not in finished]
    rows = [
        (
            f"{trial['number']}",
            *(format_value(trial["keys"][key]) if key in trial["keys"] else "" for key in keys),
            *(format_number(value) for value in trial.get("values") or [None] * len(metrics)),
            f"{trial['state']}{': ' + str(trial['reason']) if trial.get('reason') else ''}",
            format_seconds(trial["seconds"]) if is_number(trial.get("seconds")) else "",
        )
        for trial in [*order, *unfinished][:MAX_TRIALS]
    ]
    cut = f", {MAX_TRIALS} of {len(trials)}" if len(trials) > MAX_TRIALS else ""
    if trials:
        title = f"Trials, the best first{cut}"
        report.tables.append(Table(title, ("trial", *keys, *(name for name, _ in metrics), "state", "time"), rows))
    if fields.get("importances"):
        importances = sorted(fields["importances"].items(), key=lambda item: -item[1])
        report.tables.append(
            Table(
                "Importance of each key",
                ("key", "share"),
                [(key, f"{100 * value:.0f} %") for key, value in importances],
            )
        )
    if fields.get("lineage"):
        report.tables.append(_build_lineage_table(fields["lineage"]))
    log_keys = [key for key, values in fields["space"].items() if str(values).partition("(")[0] in ("log", "int_log")]
    report.charts = _build_study_charts(finished, keys, metrics, log_keys=log_keys, pareto=fields.get("pareto") or [])
    return report


def _build_study_charts(
    trials: list[dict[str, Any]],
    keys: list[str],
    metrics: list[tuple[str, str]],
    *,
    log_keys: list[str],
    pareto: list[int],
) -> list[dict[str, Any]]:
    metric, mode = metrics[0]
    if not trials:
        return []
    by_number = sorted(trials, key=lambda trial: trial["number"])
    charts: list[dict[str, Any]] = [
        {
            "kind": "history",
            "title": f"Best {metric} so far",
            "metric": metric,
            "mode": mode,
            "trials": [[trial["number"], trial["values"][0]] for trial in by_number],
        }
    ]
    if len(trials) > 1:
        rows = [[*(trial["keys"].get(key) for key in keys), trial["values"][0]] for trial in by_number]
        charts.append(
            {
                "kind": "parallel",
                "title": "Parallel coordinates: each line is a trial",
                "keys": [*keys, metric],
                "log": [*(key in log_keys for key in keys), False],
                "mode": mode,
                "rows": rows,
                "numbers": [trial["number"] for trial in by_number],
            }
        )
    if len(metrics) > 1:
        points = [[trial["values"][0], trial["values"][1], trial["number"]] for trial in by_number]
        charts.append(
            {
                "kind": "pareto",
                "title": f"Trade-off between {metrics[0][0]} and {metrics[1][0]}",
                "metrics": [name for name, _ in metrics[:2]],
                "points": points,
                "front": [number if isinstance(number, int) else number["number"] for number in pareto],
            }
        )
    return charts


def _build_lineage_table(lineage: list[dict[str, Any]]) -> Table:
    columns = [name for name in lineage[0] if not isinstance(lineage[0][name], dict | list)]
    rows = [
        (*(format_value(segment.get(name)) for name in columns), format_value(segment.get("keys")))
        for segment in lineage
    ]
    return Table("Lineage of the winner", (*columns, "keys"), rows, num_text_columns=len(columns) + 1)


def _build_crossval(folder: Path, fields: dict[str, Any]) -> FolderReport:
    metric, direction = fields["metric"], "larger" if fields["mode"] == "max" else "smaller"
    names = [metric, *(name for name in fields["metrics"] if name != metric)]
    rows = [
        (
            Path(run["run"]).name,
            format_number(run["held_out"]),
            *(format_number(run["metrics"].get(name)) for name in names),
        )
        for run in fields["runs"]
    ]
    summaries = fields["metrics"]
    rows.append(("mean", "", *(format_number(summaries[name]["mean"]) for name in names)))
    rows.append(("deviation", "", *(format_number(summaries[name]["deviation"]) for name in names)))
    rows += [
        (f"95 % {label}", "", *(format_number(summaries[name]["interval"][end]) for name in names))
        for label, end in (("from", "low"), ("to", "high"))
    ]
    if isinstance(fields.get("pooled"), dict):
        rows.append(("pooled", "", *(format_number(fields["pooled"].get(name)) for name in names)))
    summary = summaries[metric]
    return FolderReport(
        folder,
        "crossval",
        f"Cross-validation {folder.name}",
        f"{fields['task']}, {fields['folds']} folds by {fields['by']}: {metric} {format_number(summary['mean'])} "
        f"({direction} is better), 95 % interval {format_number(summary['interval']['low'])} to "
        f"{format_number(summary['interval']['high'])}",
        tables=[
            Table(
                "Folds", ("fold", "held out", *names), rows, note="Intervals are not clipped to the range of a metric."
            )
        ],
        charts=[
            {
                "kind": "intervals",
                "title": f"{metric} of each fold, and their mean with its 95 % interval",
                "metric": metric,
                "groups": [
                    {
                        "name": folder.name,
                        "values": [[Path(run["run"]).name, run["metrics"].get(metric)] for run in fields["runs"]],
                        "mean": summary["mean"],
                        "low": summary["interval"]["low"],
                        "high": summary["interval"]["high"],
                    }
                ],
            }
        ],
        notes=[str(note) for note in fields.get("notes") or ()],
    )


def build_significance(comparison: dict[str, Any]) -> FolderReport:
    """Return the section on whether groups of runs differ, from the report of `bottega compare`."""
    groups, pairs = comparison["groups"], comparison["pairs"]
    level = f"{100 * comparison['level']:g} % interval"
    group_rows = [
        (
            group["label"],
            group["name"],
            f"{group['n']:,} {group['kind']}",
            format_number(group["mean"]),
            "" if group["deviation"] is None else format_number(group["deviation"]),
            f"{format_number(group['interval']['low'])} to {format_number(group['interval']['high'])}",
        )
        for group in groups
    ]
    pair_rows = [
        (
            f"{pair['second']} - {pair['first']}",
            f"{pair['difference']:+.4g}",
            f"{pair['interval']['low']:+.4g} to {pair['interval']['high']:+.4g}",
            pair["test"],
            f"{pair['n']:,}",
            format_p(pair["p_adjusted"]),
            f"{pair['effect']['name']} {pair['effect']['size']:.2f}",
            pair["outcome"],
        )
        for pair in pairs
    ]
    chart = {
        "kind": "intervals",
        "title": f"{comparison['metric']} of each group, with the {level}",
        "metric": comparison["metric"],
        "groups": [
            {
                "name": group["label"],
                "values": [[str(run.get("run", "")), run.get("value")] for run in group.get("runs") or ()],
                "mean": group["mean"],
                "low": group["interval"]["low"],
                "high": group["interval"]["high"],
            }
            for group in groups
        ],
    }
    p_title = "p (Holm)" if len(pairs) > 1 else "p"
    return FolderReport(
        Path(),
        "significance",
        "Is the difference real?",
        f"{comparison['metric']}, from {comparison['read_from']}",
        tables=[
            Table("Groups", ("group", "runs", "n", "mean", "deviation", level), group_rows, num_text_columns=2),
            Table("Pairs", ("pair", "difference", level, "test", "n", p_title, "effect", "outcome"), pair_rows),
        ],
        charts=[chart],
        notes=[*(pair["verdict"] for pair in pairs), *comparison["notes"]],
    )
