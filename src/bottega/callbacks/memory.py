"""Memory monitor: the peak memory of a run by category, written to memory.json when training ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from bottega.core.callback import Callback, Progress
from bottega.core.errors import OutOfMemory, describe_error
from bottega.measurements import MemoryUse
from bottega.storage.durable import write_atomic


class MemoryMonitor(Callback):
    """Writes memory.json, also if training was interrupted or failed, unless no step was trained; a step that ran out of memory counts."""

    name = "memory"

    def __init__(self, path: Path, measure: Callable[[], MemoryUse], warn: Callable[[str], None]) -> None:
        self.path, self.measure, self.warn = path, measure, warn
        self._first_step = 0

    def start(self, progress: Progress) -> None:
        self._first_step = progress.step

    def finish(self, progress: Progress, error: BaseException | None) -> None:
        # A finished run was started again, or failed before its first step: the file of the earlier process stays. A step that did
        # not fit into memory was begun.
        is_out_of_memory = error is not None and describe_error(error)[0] == OutOfMemory.code
        if progress.step == self._first_step and not is_out_of_memory:
            return
        try:
            failed = error.memory if isinstance(error, OutOfMemory) else None
            write_atomic(self.path, json.dumps((failed or self.measure())._asdict(), indent=1) + "\n")
        except Exception as problem:  # a measurement must not hide the error that ended the run
            self.warn(f"{self.path}: the memory of the run could not be written ({problem})")
