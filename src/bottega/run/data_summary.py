"""data.json: what a run is trained on, in numbers, for the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bottega.core.rundir import RunDirectory
from bottega.tasks.workload import Workload
from bottega.techniques.training_plan import TrainingPlan

DATA_FILE = "data.json"


def write_data_summary(directory: RunDirectory, plan: TrainingPlan, workload: Workload) -> None:
    """Write the number of samples of each split and class, the fingerprint of the data, and notes on what was left out.

    Counting the classes reads a column of all training data, so a run that starts again on the same data takes the counts of
    its earlier start.
    """
    fingerprint = workload.data.fingerprint
    previous = _read_summary(directory.path / DATA_FILE)
    is_counted = previous.get("fingerprint") == fingerprint and isinstance(previous.get("classes"), dict)
    splits = {"train": plan.training, "validation": plan.validation, "test": workload.data.test()}
    summary = {
        "splits": {name: len(source) for name, source in splits.items() if source is not None},
        "unit": workload.unit,
        "classes": previous["classes"] if is_counted else workload.data.count_classes(),
        "fingerprint": fingerprint,
        "notes": list(workload.data.notes),
    }
    directory.write(directory.path / DATA_FILE, json.dumps(summary, indent=1) + "\n")


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # the first start, or a file that is not ours
    return summary if isinstance(summary, dict) else {}
