"""metrics.jsonl: one line for each log and evaluation, for programs to read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bottega.core.callback import Callback, Progress
from bottega.core.rundir import RunDirectory


class JsonLines(Callback):
    """A full disk must not end a training, so a failed write is reported once and the run goes on."""

    name = "jsonl"

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path, self.warn = path, warn
        self._complained = False

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._write({"step": progress.step, "kind": "train", "samples": progress.samples, **metrics})

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._write({"step": progress.step, "kind": "eval", "samples": progress.samples, **metrics})

    def rewind(self, progress: Progress) -> None:
        RunDirectory(self.path.parent).truncate_metrics(progress)

    def _write(self, row: dict[str, Any]) -> None:
        # JSON has no NaN; None is what a reader can tell from a number.
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                # After a failed write the file may end in half a line; this one starts on its own.
                file.write(("\n" if self._complained else "") + json.dumps(clean) + "\n")
        except OSError as error:
            if not self._complained:
                self.warn(f"cannot write {self.path}: {error.strerror}; training goes on without it")
            self._complained = True
