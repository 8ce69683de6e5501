"""Tables of the best evaluation during training, such as the confusion matrix, written for the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bottega.core.callback import Callback, Progress
from bottega.core.types import Rows
from bottega.redaction import redact_values
from bottega.storage.durable import write_atomic
from bottega.storage.json_values import replace_non_finite


class EvaluationTables(Callback):
    """Writes metrics.json in the format of `bottega evaluate` after each evaluation that is the best so far.

    `score` is the task's function of the rows, which are remembered until the evaluation ends; `build_tables` returns what is
    written beside the metrics, and nothing is written if that is empty.
    """

    name = "evaluation_tables"

    def __init__(
        self,
        folder: Path,
        *,
        score: Callable[[Rows], dict[str, float]],
        build_tables: Callable[[Rows], dict[str, Any]],
        warn: Callable[[str], None],
    ) -> None:
        self.path, self.warn = folder / "metrics.json", warn
        self._score, self._build_tables = score, build_tables
        self._rows: Rows = {}

    def score(self, rows: Rows) -> dict[str, float]:
        """Return the task's metrics of the rows."""
        self._rows = rows
        return self._score(rows)

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        rows, self._rows = self._rows, {}
        tables = self._build_tables(rows) if rows and progress.best_step == progress.step else {}
        if not tables:
            return
        fields = {
            **metrics,
            "checkpoint": f"checkpoints/step-{progress.step:08d}",
            "split": "validation",
            "samples": len(next(iter(rows.values()))),
            **tables,
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps(redact_values(replace_non_finite(fields)), allow_nan=False) + "\n")
        except OSError as error:
            self.warn(f"cannot write {self.path}: {error.strerror}; training continues without it")
