"""TensorBoard event files beside the metrics."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from bottega.core.callback import Callback, Progress


class TensorBoard(Callback):
    """The writer is imported on first use: it takes seconds, and nobody should wait for it before the first step."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    def start(self, progress: Progress) -> None:
        logging.getLogger("tensorboard").setLevel(logging.ERROR)
        from torch.utils.tensorboard import SummaryWriter

        # Events after the step we resume from belong to a process that was killed; TensorBoard drops them.
        self._writer = SummaryWriter(str(self.folder), purge_step=progress.step + 1 if progress.step else None)

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._add("train", progress, metrics)

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._add("validation", progress, metrics)

    def after_sample(self, progress: Progress, folder: Path) -> None:
        for path in sorted(folder.glob("*.txt")):
            self._writer.add_text(
                f"samples/{path.stem}", "    " + path.read_text().replace("\n", "\n    "), progress.step
            )

    def finish(self, progress: Progress, error: BaseException | None) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, group: str, progress: Progress, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"{group}/{name}", value, progress.step)
