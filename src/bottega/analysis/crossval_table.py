"""Summarise folds: mean, standard deviation and interval of each metric, and metrics of the pooled predictions."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bottega.analysis.compare import CLIPPED_MARK, DIRECTION_TEXT, clip_to_bounds, format_table
from bottega.analysis.statistics import mean_confidence_interval
from bottega.tasks.metrics.classification import (
    average_metrics,
    confusion_matrices,
    confusion_matrix,
    per_class_metrics,
)
from bottega.tasks.registry import TASKS

CONFIDENCE_LEVEL = 0.95


def summarise_folds(values: Sequence[float], *, num_folds: int) -> dict[str, Any]:
    """Return mean, deviation and intervals of a metric over folds.

    `interval` has the correction of Nadeau and Bengio (2003); `uncorrected` treats folds as independent.
    """
    numbers = np.array(values, np.float64)
    return {
        "mean": float(numbers.mean()),
        "deviation": float(numbers.std(ddof=1)),
        "interval": dataclasses.asdict(
            mean_confidence_interval(numbers, level=CONFIDENCE_LEVEL, test_train_ratio=1 / (num_folds - 1))
        ),
        "uncorrected": dataclasses.asdict(mean_confidence_interval(numbers, level=CONFIDENCE_LEVEL)),
    }


def summarise_test(values: Sequence[float]) -> dict[str, Any]:
    """Return mean and deviation over folds on one test set; no interval, as the folds share the test samples."""
    numbers = np.array(values, np.float64)
    return {"mean": float(numbers.mean()), "deviation": float(numbers.std(ddof=1))}


def pool_predictions(rows: Sequence[dict[str, Any]], classes: Sequence[str]) -> tuple[dict[str, float], np.ndarray]:
    """Return the metrics and confusion matrix of all predictions, as if one classifier had made them.

    Probabilities of different models are not on one scale, so metrics that rank or weight by them are left out.
    """
    class_index = {name: index for index, name in enumerate(classes)}
    if isinstance(rows[0]["label"], list):
        labels, predictions = (np.zeros((len(rows), len(classes)), bool) for _ in range(2))
        for i, row in enumerate(rows):
            labels[i, [class_index[name] for name in row["label"]]] = True
            predictions[i, [class_index[name] for name in row["predicted"]]] = True
        matrix = confusion_matrices(labels, predictions)
        metrics = {
            "exact_match": float((labels == predictions).all(1).mean()),
            "label_accuracy": float((labels == predictions).mean()),
        }
    else:
        label, predicted = (np.array([class_index[row[key]] for row in rows]) for key in ("label", "predicted"))
        matrix = confusion_matrix(label, predicted, len(classes))
        metrics = {"accuracy": float((label == predicted).mean())}
    means = average_metrics(per_class_metrics(matrix))
    return {**metrics, "macro_f1": means["macro_f1"], "weighted_f1": means["weighted_f1"]}, matrix


def read_fold_predictions(files: Sequence[tuple[int, Path]]) -> list[dict[str, Any]]:
    """Return the rows of all predictions files, each with its fold."""
    return [
        {**json.loads(line), "fold": fold}
        for fold, file in files
        for line in file.read_text(encoding="utf-8").splitlines()
    ]


def format_report(report: dict[str, Any]) -> str:
    """Format a report for the terminal: a row per fold, then mean, deviation and interval."""
    repeats = f", {report['repeats']} times" if report["repeats"] > 1 else ""
    by = report["by"] + (f" {report['field']}" if report["field"] else "")
    lines = [
        f"{report['metric']}{DIRECTION_TEXT[report['mode']]}: {report['folds']} folds ({by}){repeats}, with the {report['checkpoint']} "
        "checkpoint of each",
        "",
        *_format_fold_table(report, "metrics", report["metrics"], pooled=report.get("pooled", {})),
    ]
    if report.get("test"):
        lines += ["", "test, the same samples for all folds", "", *_format_fold_table(report, "test", report["test"])]
    lines += ["", *(f"{name:<12}{file}" for name, file in report["files"].items())]
    lines.append(f"{'report':<12}bottega report {shlex.quote(report['folder'])}")
    notes = list(report["notes"])
    ends = [(name, summary["interval"][end]) for name, summary in report["metrics"].items() for end in ("low", "high")]
    if any(_clip_end(name, value, report["task"])[1] for name, value in ends):
        notes.append(
            f"{CLIPPED_MARK} the interval exceeds the range of the metric and is clipped; crossval.json has it unclipped"
        )
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _clip_end(name: str, value: float, task: str) -> tuple[float, str]:
    """Clip an end of an interval to the range of the metric; return it with a mark where it was clipped."""
    # Cross-entropy is never negative; other losses can be. `_before` is the value before adaptation.
    if name.removesuffix("_before") == "loss" and TASKS[task].loss_is_cross_entropy:
        return max(value, 0.0), CLIPPED_MARK if value < 0 else ""
    return clip_to_bounds(value, name)


def _format_fold_table(
    report: dict[str, Any], section: str, summaries: dict[str, Any], *, pooled: dict[str, float] | None = None
) -> list[str]:
    names = sorted(summaries, key=lambda name: name != report["metric"])

    def cells(values: dict[str, float | None]) -> list[str]:
        return ["" if values.get(name) is None else f"{values[name]:.4f}" for name in names]

    rows = [["", *(("held out", "step") if section == "metrics" else ("", "step")), *names]]
    for run in report["runs"]:
        held_out = f"{run['held_out']:,}" if section == "metrics" and run["held_out"] is not None else ""
        rows.append([f"fold-{run['number']}", held_out, f"{run['step']:,}", *cells(run[section])])
    rows.append([""] * len(rows[0]))
    for title in ("mean", "deviation"):
        rows.append([title, "", "", *cells({name: summaries[name][title] for name in names})])
    for title, end in (("from", "low"), ("to", "high")):
        if all("interval" in summaries[name] for name in names):
            ends = [_clip_end(name, summaries[name]["interval"][end], report["task"]) for name in names]
            rows.append(
                [f"{100 * CONFIDENCE_LEVEL:g} % {title}", "", "", *(f"{mark}{value:.4f}" for value, mark in ends)]
            )
    if pooled:
        rows.append(["pooled", "", "", *cells({name: pooled.get(name) for name in names})])
    return format_table(rows, right=tuple(range(1, len(rows[0]))))
