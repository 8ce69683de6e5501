"""Summarise folds: mean, standard deviation and interval of each metric, and metrics of the pooled predictions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bottega.analysis.compare import CLIPPED_MARK, DIRECTION_TEXT, clip_to_bounds, format_table
from bottega.analysis.statistics import mean_confidence_interval
from bottega.tasks.measures import classification as measures
from bottega.tasks.registry import TASKS

CONFIDENCE_LEVEL = 0.95


def summarise_folds(values: Sequence[float], *, folds: int) -> dict[str, Any]:
    """`interval` is corrected as Nadeau and Bengio (2003) do, `uncorrected` takes folds for independent."""
    numbers = np.array(values, np.float64)
    return {
        "mean": float(numbers.mean()),
        "deviation": float(numbers.std(ddof=1)),
        "interval": dataclasses.asdict(
            mean_confidence_interval(numbers, level=CONFIDENCE_LEVEL, test_train_ratio=1 / (folds - 1))
        ),
        "uncorrected": dataclasses.asdict(mean_confidence_interval(numbers, level=CONFIDENCE_LEVEL)),
    }


def summarise_test(values: Sequence[float]) -> dict[str, Any]:
    """Of one test set that all folds answer: how they differ says nothing of how other samples would."""
    numbers = np.array(values, np.float64)
    return {"mean": float(numbers.mean()), "deviation": float(numbers.std(ddof=1))}


def pool_predictions(rows: Sequence[dict[str, Any]], classes: Sequence[str]) -> tuple[dict[str, float], np.ndarray]:
    """Measures of all answers as those of one classifier, and what was taken for what.

    Chances of different models are not on one scale, so that what ranks or weighs them is left out.
    """
    number = {name: place for place, name in enumerate(classes)}
    if isinstance(rows[0]["label"], list):
        truth, told = (np.zeros((len(rows), len(classes)), bool) for _ in range(2))
        for row, answer in enumerate(rows):
            truth[row, [number[name] for name in answer["label"]]] = True
            told[row, [number[name] for name in answer["predicted"]]] = True
        matrix = measures.confusion_matrices(truth, told)
        found = {"exact_match": float((truth == told).all(1).mean()), "label_accuracy": float((truth == told).mean())}
    else:
        label, predicted = (np.array([number[row[key]] for row in rows]) for key in ("label", "predicted"))
        matrix = measures.confusion_matrix(label, predicted, len(classes))
        found = {"accuracy": float((label == predicted).mean())}
    means = measures.average_metrics(measures.per_class_metrics(matrix))
    return {**found, "macro_f1": means["macro_f1"], "weighted_f1": means["weighted_f1"]}, matrix


def read_fold_predictions(files: Sequence[tuple[int, Path]]) -> list[dict[str, Any]]:
    """The lines of the folds' predictions, each with its fold."""
    return [
        {**json.loads(line), "fold": fold}
        for fold, file in files
        for line in file.read_text(encoding="utf-8").splitlines()
    ]


def format_report(report: dict[str, Any]) -> str:
    """For the terminal: a row a fold, and below them what they say together."""
    times = f", {report['repeats']} times" if report["repeats"] > 1 else ""
    by = report["by"] + (f" {report['field']}" if report["field"] else "")
    lines = [
        f"{report['metric']}{DIRECTION_TEXT[report['mode']]}: {report['folds']} folds ({by}){times}, with the {report['checkpoint']} "
        "checkpoint of each",
        "",
        *_columns(report, "metrics", report["metrics"], pooled=report.get("pooled", {})),
    ]
    if report.get("test"):
        lines += ["", "test, the same samples for all folds", "", *_columns(report, "test", report["test"])]
    lines += ["", *(f"{name:<12}{file}" for name, file in report["files"].items())]
    notes = list(report["notes"])
    ends = [(name, one["interval"][end]) for name, one in report["metrics"].items() for end in ("low", "high")]
    if any(_end(name, value, report["task"])[1] for name, value in ends):
        notes.append(
            f"{CLIPPED_MARK} the interval goes beyond what the metric can be; crossval.json has it as it was computed"
        )
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


def _end(name: str, value: float, task: str) -> tuple[float, str]:
    """An end of an interval as far as the metric goes, and a sign where that is not the whole way."""
    # That of others may have terms below 0.
    if name.removesuffix("_before") == "loss" and TASKS[task].loss_is_cross_entropy:
        return max(value, 0.0), CLIPPED_MARK if value < 0 else ""
    return clip_to_bounds(value, name)


def _columns(
    report: dict[str, Any], part: str, found: dict[str, Any], *, pooled: dict[str, float] | None = None
) -> list[str]:
    names = sorted(found, key=lambda name: name != report["metric"])

    def cells(values: dict[str, float | None]) -> list[str]:
        return ["" if values.get(name) is None else f"{values[name]:.4f}" for name in names]

    rows = [["", *(("held out", "step") if part == "metrics" else ("", "step")), *names]]
    for run in report["runs"]:
        held = f"{run['held_out']:,}" if part == "metrics" and run["held_out"] is not None else ""
        rows.append([f"fold-{run['number']}", held, f"{run['step']:,}", *cells(run[part])])
    rows.append([""] * len(rows[0]))
    for title in ("mean", "deviation"):
        rows.append([title, "", "", *cells({name: found[name][title] for name in names})])
    for title, end in (("from", "low"), ("to", "high")):
        if all("interval" in found[name] for name in names):
            ends = [_end(name, found[name]["interval"][end], report["task"]) for name in names]
            rows.append(
                [f"{100 * CONFIDENCE_LEVEL:g} % {title}", "", "", *(f"{sign}{value:.4f}" for value, sign in ends)]
            )
    if pooled:
        rows.append(["all answers", "", "", *cells({name: pooled.get(name) for name in names})])
    return format_table(rows, right=tuple(range(1, len(rows[0]))))
