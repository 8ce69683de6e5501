"""metrics.jsonl and modules.jsonl: one JSON object for each log and evaluation, and for each inspected step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bottega.core.callback import Callback, Progress
from bottega.metrics_log import truncate_metrics
from bottega.redaction import redact_values
from bottega.storage.durable import open_without_following_links
from bottega.storage.json_values import replace_non_finite


class LineWriter(Callback):
    """Base class of the callbacks that append to a file of JSON lines.

    A failed write, as on a full disk, is reported once; its lines are kept and written with the next line.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path, self.warn = path, warn
        self._has_warned = False
        self._pending_lines: list[str] = []
        self._complete_size: int | None = None
        """Bytes of complete lines while the file may end with part of one; else None."""

    def rewind(self, progress: Progress) -> None:
        self._pending_lines, self._complete_size = [], None  # they belong to later steps
        truncate_metrics(self.path, progress)

    def finish(self, progress: Progress, error: BaseException | None) -> None:
        if self._pending_lines:
            self._flush()

    def write(self, progress: Progress, kind: str, fields: Mapping[str, Any]) -> None:
        """Append a line. JSON has no NaN or infinity; they are written as null."""
        row = {"step": progress.step, "kind": kind, "samples": progress.samples, **replace_non_finite(fields)}
        self._pending_lines.append(json.dumps(redact_values(row)) + "\n")
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


class JsonLines(LineWriter):
    """Appends the metrics of each log and evaluation."""

    name = "jsonl"

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        self.write(progress, "train", metrics)

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self.write(progress, "eval", metrics)


class ModuleLines(LineWriter):
    """Appends the statistics of all modules in each inspected step."""

    name = "modules"

    def after_inspect(self, progress: Progress, modules: Mapping[str, Mapping[str, float]]) -> None:
        self.write(progress, "modules", {"modules": modules})
