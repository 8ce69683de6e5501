"""metrics.jsonl: one JSON object for each log and evaluation."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bottega.core.callback import Callback, Progress
from bottega.core.rundir import RunDirectory
from bottega.storage.durable import open_without_following_links


class JsonLines(Callback):
    """Appends each log and evaluation as a line of JSON.

    A failed write, as on a full disk, is reported once; its lines are kept and written with the next line.
    """

    name = "jsonl"

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path, self.warn = path, warn
        self._has_warned = False
        self._pending_lines: list[str] = []
        self._complete_size: int | None = None
        """Bytes of complete lines while the file may end with part of one; else None."""

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._write({"step": progress.step, "kind": "train", "samples": progress.samples, **metrics})

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._write({"step": progress.step, "kind": "eval", "samples": progress.samples, **metrics})

    def rewind(self, progress: Progress) -> None:
        self._pending_lines, self._complete_size = [], None  # they belong to later steps
        RunDirectory(self.path.parent).truncate_metrics(progress)

    def finish(self, progress: Progress, error: BaseException | None) -> None:
        if self._pending_lines:
            self._flush()

    def _write(self, row: dict[str, Any]) -> None:
        # JSON has no NaN or infinity; they are written as null.
        finite_row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._pending_lines.append(json.dumps(finite_row) + "\n")
        self._flush()

    def _flush(self) -> None:
        try:
            with open(self.path, "ab", buffering=0, opener=open_without_following_links) as file:
                if self._complete_size is not None:
                    file.truncate(self._complete_size)
                self._complete_size = file.seek(0, os.SEEK_END)
                remaining = memoryview("".join(self._pending_lines).encode())
                while remaining:
                    remaining = remaining[file.write(remaining) :]
            self._pending_lines, self._complete_size = [], None
        except OSError as error:
            if not self._has_warned:
                self.warn(f"cannot write {self.path}: {error.strerror}; its lines are buffered until writing succeeds")
            self._has_warned = True
