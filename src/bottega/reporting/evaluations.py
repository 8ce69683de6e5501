"""Evaluation results of a run as tables and charts: metrics, classes, confusion, calibration, judge scores, arms, sheets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bottega.reporting.media import MediaBudget, MediaItem, read_item
from bottega.reporting.tables import Table, format_number
from bottega.run_files.logs import is_number
from bottega.run_files.reading import list_folder, read_json_object
from bottega.run_files.record import BASELINE_FILE

MAX_CLASSES = 200
"""Rows of the table of classes."""
MAX_CONFUSION_CLASSES = 60
"""Classes of the confusion matrix; with more, those with the most errors are shown."""
MAX_SHEETS = 12
UNKNOWN_FORMAT = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""Errors of reading values that another version or program has written."""
COLUMNS = {"real": "real, held out", "through_codec": "real, through codec"}
"""Fields of a generator's evaluation that hold the same metrics of other samples."""


@dataclass
class EvaluationResult:
    """One evaluation of a run: on which data, tables, charts for the page's script, and pictures."""

    title: str
    subtitle: str
    metrics: dict[str, float]
    tables: list[Table] = field(default_factory=list)
    charts: list[dict[str, Any]] = field(default_factory=list)
    sheets: list[MediaItem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_validation: bool = False
    """Whether it was measured on the validation split, as the best metric of the run is."""
    baselines: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Metric -> (what it is compared with, value)."""


def collect_evaluations(
    run: Path, budget: MediaBudget, notes: list[str], *, class_counts: Any = None
) -> list[EvaluationResult]:
    """Return the evaluations in RUN/evaluation/NAME and RUN/results; of two of the same data and checkpoint the latter.

    `class_counts` are the training samples of each class: a classifier is compared with always predicting the most frequent.
    """
    folders = [*list_folder(run / "evaluation", run), run / "results"]
    files = [folder / "metrics.json" for folder in folders]
    results: dict[Any, EvaluationResult] = {}
    for file in files:
        if fields := read_json_object(file, run, notes):
            try:
                key = (fields.get("split"), Path(str(fields.get("checkpoint"))).name) if fields.get("split") else file
                results.pop(key, None)
                results[key] = _build_result(fields, file, run, budget, class_counts=class_counts)
            except UNKNOWN_FORMAT:
                notes.append(f"{file.relative_to(run)} has an unknown format and is left out")
    _add_baseline(results.values(), run, notes)
    return list(results.values())


def _add_baseline(results: Iterable[EvaluationResult], run: Path, notes: list[str]) -> None:
    """Compare evaluations on the validation split with the simple model that was fitted at the end of training."""
    fields = read_json_object(run / BASELINE_FILE, run, notes)
    metrics = fields.get("metrics")
    for result in results:
        if result.is_validation and isinstance(metrics, dict):
            result.baselines |= {
                name: (str(fields.get("name")), float(value)) for name, value in metrics.items() if is_number(value)
            }


def _build_result(
    fields: dict[str, Any], file: Path, run: Path, budget: MediaBudget, *, class_counts: Any
) -> EvaluationResult:
    metrics = {name: float(value) for name, value in fields.items() if is_number(value) and name != "samples"}
    split, samples = fields.get("split"), fields.get("samples")
    origin = f"the {split} split" if split else fields.get("data") or "other data"
    counted = f", {samples:,} samples" if isinstance(samples, int) else ""
    checkpoint = Path(str(fields["checkpoint"])).name if fields.get("checkpoint") else None
    result = EvaluationResult(
        title=f"Evaluation on {origin}",
        subtitle=f"{file.parent.relative_to(run).as_posix()}{counted}{f', checkpoint {checkpoint}' if checkpoint else ''}",
        metrics=metrics,
        is_validation=split == "validation",
        notes=[str(note) for note in fields.get("notes") or ()],
    )
    if "arms" in fields:
        _add_arms(result, fields)
    elif "real" in fields:
        _add_generator_scores(result, fields)
    else:
        result.tables.append(
            Table("Metrics", ("metric", "value"), [(name, format_number(value)) for name, value in metrics.items()])
        )
    if fields.get("per_class"):
        _add_classes(result, fields["per_class"], class_counts)
    if fields.get("confusion"):
        result.charts.append(_build_confusion_chart(fields["confusion"]))
    if fields.get("calibration"):
        result.charts.append(_build_calibration_chart(fields["calibration"]))
    sheets = [path for path in list_folder(file.parent / "sheets", run) if path.suffix == ".png"][:MAX_SHEETS]
    result.sheets = [read_item(path, run, budget) for path in sheets]
    return result


def _add_classes(result: EvaluationResult, per_class: dict[str, dict[str, float]], class_counts: Any) -> None:
    names = ("precision", "recall", "f1")
    rows = [
        (name, *(format_number(row[key]) for key in names), f"{int(row['support']):,}")
        for name, row in list(per_class.items())[:MAX_CLASSES]
    ]
    cut = f", {MAX_CLASSES} of {len(per_class):,}" if len(per_class) > MAX_CLASSES else ""
    result.tables.append(Table(f"Classes{cut}", ("class", *names, "samples"), rows))
    total = sum(row["support"] for row in per_class.values())
    counts = {name: class_counts.get(name, 0) for name in per_class} if isinstance(class_counts, dict) else {}
    if total and any(counts.values()) and "accuracy" in result.metrics:
        frequent = max(counts, key=lambda name: counts[name])
        title = f"always the most frequent class of the training data ({frequent})"
        result.baselines["accuracy"] = (title, per_class[frequent]["support"] / total)


def _add_generator_scores(result: EvaluationResult, fields: dict[str, Any]) -> None:
    """Add the table of generated beside real samples; the real ones are the baseline."""
    columns = {
        "generated": result.metrics,
        **{title: fields[name] for name, title in COLUMNS.items() if name in fields},
    }
    names = list(fields["real"])
    rows = [
        (name, *(format_number(values[name]) if is_number(values.get(name)) else "" for values in columns.values()))
        for name in names
    ]
    counts = fields.get("counts") or {}
    numbers = [counts.get("generated"), *(counts.get(name, counts.get("real")) for name in COLUMNS if name in fields)]
    if any(number is not None for number in numbers):
        rows.append(("samples", *(format_number(number) for number in numbers)))
    others = [(name, format_number(value)) for name, value in result.metrics.items() if name not in names]
    result.tables.append(Table("Generated and real samples", ("metric", *columns), rows))
    if others:
        result.tables.append(Table("Loss and other metrics", ("metric", "value"), others))
    result.baselines |= {
        name: ("real, held-out samples", float(value)) for name, value in fields["real"].items() if is_number(value)
    }


def _add_arms(result: EvaluationResult, fields: dict[str, Any]) -> None:
    """Add the table of a personalised evaluation: a column for each input of the generator, and the tests between them."""
    arms, chance = fields["arms"], fields.get("chance") or {}
    names = list(dict.fromkeys(name for values in arms.values() for name in values))
    rows = [
        (
            name,
            *(format_number(values[name]["mean"]) if name in values else "" for values in arms.values()),
            format_number(chance[name]) if is_number(chance.get(name)) else "",
        )
        for name in names
    ]
    result.tables.append(Table("Personalised images by input", ("metric", *arms, "chance"), rows))
    if fields.get("tests"):
        result.tables.append(_build_test_table(fields["tests"]))
    if "none" in arms:
        result.baselines |= {
            name: ("without personalisation", float(values["mean"]))
            for name, values in arms["none"].items()
            if is_number(values.get("mean"))
        }


def _build_test_table(tests: list[dict[str, Any]]) -> Table:
    rows = [
        (
            test["measure"],
            f"{test['second']} - {test['first']}",
            f"{test['difference']:+.4f}",
            f"{test['interval']['low']:+.4f} to {test['interval']['high']:+.4f}",
            test["test"],
            format_p(test["p_adjusted"]),
        )
        for test in tests
    ]
    return Table(
        "Paired tests over people", ("metric", "pair", "difference", "95 % interval", "test", "p (Holm)"), rows
    )


def format_p(p: float) -> str:
    """Return a p value with four decimals."""
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def _build_confusion_chart(confusion: dict[str, Any]) -> dict[str, Any]:
    """Return the chart of a confusion matrix, cut to the classes with the most errors if there are many."""
    classes, matrix = list(confusion["classes"]), [list(map(int, row)) for row in confusion["counts"]]
    note = ""
    if len(classes) > MAX_CONFUSION_CLASSES:
        errors = [sum(row) + sum(other[i] for other in matrix) - 2 * row[i] for i, row in enumerate(matrix)]
        worst = sorted(sorted(range(len(classes)), key=lambda i: -errors[i])[:MAX_CONFUSION_CLASSES])
        note = f"the {MAX_CONFUSION_CLASSES} of {len(classes):,} classes with the most errors"
        classes, matrix = [classes[i] for i in worst], [[matrix[i][j] for j in worst] for i in worst]
    return {
        "kind": "confusion",
        "title": "Confusion matrix: rows are true classes, columns predictions",
        "note": note,
        "classes": classes,
        "counts": matrix,
    }


def _build_calibration_chart(calibration: dict[str, Any]) -> dict[str, Any]:
    columns = {name: list(calibration[name]) for name in ("edges", "counts", "accuracy")}
    return {"kind": "calibration", "title": "Calibration: accuracy by confidence", "note": "", **columns}
