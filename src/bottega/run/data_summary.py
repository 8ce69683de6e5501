"""data.json: what a run is trained on, in numbers, for the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bottega.core.errors import first_line
from bottega.core.rundir import RunDirectory
from bottega.tasks.task_data import TaskData
from bottega.tasks.workload import Workload
from bottega.techniques.training_plan import TrainingPlan
from bottega.terminal import print_notice

DATA_FILE = "data.json"


def write_data_summary(directory: RunDirectory, plan: TrainingPlan, workload: Workload) -> None:
    """Write the number of samples of each split and class, of samples that occur twice, the fingerprint of the data, and notes.

    Counting reads much of the data, so a run that starts again on the same data takes the counts of its earlier start.
    """
    data, fingerprint = workload.data, workload.data.fingerprint
    previous = _read_summary(directory.path / DATA_FILE)
    counts = {
        name: previous[name]
        if previous.get("fingerprint") == fingerprint and isinstance(previous.get(name), dict)
        else count()
        for name, count in (("classes", data.count_classes), ("duplicates", lambda: _compare_splits(data)))
    }
    splits = {"train": plan.training, "validation": plan.validation, "test": workload.data.test()}
    summary = {
        "splits": {name: len(source) for name, source in splits.items() if source is not None},
        "unit": workload.unit,
        **counts,
        "fingerprint": fingerprint,
        "notes": list(workload.data.notes),
    }
    directory.write(directory.path / DATA_FILE, json.dumps(summary, indent=1) + "\n")


def _compare_splits(data: TaskData) -> dict[str, Any]:
    """Return what the splits have in common; nothing if that fails, because only a diagnosis needs it."""
    try:
        return dict(data.compare_splits())
    except Exception as error:  # a plugin's data, or a damaged table, which training reports itself
        print_notice(f"bottega: duplicates and leaks between splits are not counted: {first_line(error)}")
        return {}


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # the first start, or a file that is not ours
    return summary if isinstance(summary, dict) else {}
