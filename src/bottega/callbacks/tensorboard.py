"""TensorBoard event files beside the metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bottega.core.callback import Callback, Progress


class TensorBoard(Callback):
    """The writer is imported on first use: it takes seconds, and nobody should wait for it before the first step.

    A full disk must not end a training, so a failed write is reported once and the run goes on.
    """

    name = "tensorboard"

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder, self.warn = folder, warn
        self._writer: Any = None

    def start(self, progress: Progress) -> None:
        logging.getLogger("tensorboard").setLevel(logging.ERROR)
        from torch.utils.tensorboard import SummaryWriter

        def begin() -> None:
            # Events after this step belong to a process that was killed, or were taken back; TensorBoard drops them.
            self._writer = SummaryWriter(str(self.folder), purge_step=progress.step + 1)

        self._try(begin)

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._add("train", progress, metrics)

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._add("validation", progress, metrics)

    def after_sample(self, progress: Progress, folder: Path) -> None:
        def add() -> None:
            for path in sorted(folder.glob("*.txt")):
                text = "    " + path.read_text(encoding="utf-8").replace("\n", "\n    ")
                self._writer.add_text(f"samples/{path.stem}", text, progress.step)

        if self._writer is not None:
            self._try(add)

    def rewind(self, progress: Progress) -> None:
        self.finish(progress, None)
        self.start(progress)

    def finish(self, progress: Progress, error: BaseException | None) -> None:
        if self._writer is not None:
            self._try(self._writer.close)

    def _add(self, group: str, progress: Progress, metrics: dict[str, float]) -> None:
        def add() -> None:
            for name, value in metrics.items():
                self._writer.add_scalar(f"{group}/{name}", value, progress.step)

        if self._writer is not None:
            self._try(add)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self.warn(
                f"no TensorBoard events in {self.folder}: {error.strerror or error}; training goes on without them"
            )
            self._writer = None
