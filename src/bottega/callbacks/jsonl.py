"""metrics.jsonl: one line for each log and evaluation, for programs to read."""

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
    """A full disk must not end a training, so a failed write is reported once and the run goes on. Lines that could not be
    written wait for the next one."""

    name = "jsonl"

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path, self.warn = path, warn
        self._has_warned = False
        self._waiting: list[str] = []
        self._size: int | None = None
        """Bytes of whole lines, while the file may end in a part of one."""

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._write({"step": progress.step, "kind": "train", "samples": progress.samples, **metrics})

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._write({"step": progress.step, "kind": "eval", "samples": progress.samples, **metrics})

    def rewind(self, progress: Progress) -> None:
        self._waiting, self._size = [], None  # all of them are of later steps
        RunDirectory(self.path.parent).truncate_metrics(progress)

    def finish(self, progress: Progress, error: BaseException | None) -> None:
        if self._waiting:
            self._flush()

    def _write(self, row: dict[str, Any]) -> None:
        # JSON has no NaN; None is what a reader can tell from a number.
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._waiting.append(json.dumps(clean) + "\n")
        self._flush()

    def _flush(self) -> None:
        try:
            with open(self.path, "ab", buffering=0, opener=open_without_following_links) as file:
                if self._size is not None:
                    file.truncate(self._size)
                self._size = file.seek(0, os.SEEK_END)
                rest = memoryview("".join(self._waiting).encode())
                while rest:
                    rest = rest[file.write(rest) :]
            self._waiting, self._size = [], None
        except OSError as error:
            if not self._has_warned:
                self.warn(f"cannot write {self.path}: {error.strerror}; its lines wait until that is possible again")
            self._has_warned = True
