"""TensorBoard: metrics, samples, module statistics and histograms of a run as events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bottega.callbacks.media_files import find_media, render_film_strip
from bottega.callbacks.tensorboard_events import EventFile, has_tag_at, truncate_last_event
from bottega.callbacks.tensorboard_hparams import (
    Hyperparameters,
    is_session_end,
    make_layout_summary,
    make_session_end,
    make_session_start,
)
from bottega.callbacks.tensorboard_summaries import (
    make_histogram_summary,
    make_media_summary,
    make_scalar_summary,
    make_text_summary,
)
from bottega.core.callback import Callback, Histogram, Progress
from bottega.core.errors import Interrupted


class TensorBoard(Callback):
    """Writes everything that a run logs as TensorBoard events.

    TensorBoard is imported on first use, because that takes a second. A failed write raises OSError; `TrackerGuard` turns it into a
    warning. `metrics` are the names of the evaluation metrics, `best_metric` the one that decides which checkpoint is best.
    """

    name = "tensorboard"

    def __init__(
        self,
        folder: Path,
        warn: Callable[[str], None],
        *,
        hyperparameters: Hyperparameters | None = None,
        metrics: Sequence[str] = (),
        best_metric: str = "loss",
    ) -> None:
        self.folder, self.warn = folder, warn
        self.hyperparameters, self.metrics, self.best_metric = hyperparameters or {}, metrics, best_metric
        self._events: EventFile | None = None
        self._has_warned = False
        self._start_step = 0

    def start(self, progress: Progress) -> None:
        logging.getLogger("tensorboard").setLevel(logging.ERROR)
        # TensorBoard shows the first end of a run that it reads, so that of an earlier process would hide the real one.
        truncate_last_event(self.folder, is_session_end)
        self._start_step = progress.step
        self._open_events(progress)

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._add_scalars("train", metrics, progress.step)

    def after_inspect(self, progress: Progress, modules: Mapping[str, Mapping[str, float]]) -> None:
        for name, statistics in modules.items():
            self._add_scalars(f"modules/{name}", statistics, progress.step)

    def after_histograms(self, progress: Progress, histograms: Mapping[str, Histogram]) -> None:
        summaries = (make_histogram_summary(name, histogram) for name, histogram in histograms.items())
        self._add([summary for summary in summaries if summary is not None], progress.step)

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        # An evaluation that is due at the first step of a resumed run is repeated, even if a killed process has logged it.
        if progress.step == self._start_step and has_tag_at(self.folder, "validation/", progress.step):
            return
        self._add_scalars("validation", metrics, progress.step)
        if progress.best is not None:
            # The HPARAMS tab shows the first scalars by name; this one comes before all others.
            self._add_scalars("best", {self.best_metric: progress.best}, progress.step)

    def after_sample(self, progress: Progress, folder: Path) -> None:
        for summary in self._make_sample_summaries(folder):
            self._add([summary], progress.step)

    def rewind(self, progress: Progress) -> None:
        if self._events is not None:
            self._events.close()
            self._open_events(progress)

    def finish(self, progress: Progress, error: BaseException | None) -> None:
        if self._events is None:
            return
        try:
            # A run that was interrupted or paused has not ended.
            is_paused = error is None and progress.step < progress.total and progress.stop is None
            if not is_paused and not isinstance(error, Interrupted | KeyboardInterrupt):
                self._add([make_session_end(is_success=error is None)], progress.step)
        finally:
            self._events.close()
            self._events = None

    def _open_events(self, progress: Progress) -> None:
        """Open a new file, which makes TensorBoard discard the steps that are run again."""
        self._events = EventFile(self.folder, purge_step=progress.step + 1)
        comparison = [
            make_session_start(self.hyperparameters, group=self.folder.name),
            make_layout_summary(self.metrics),
        ]
        # At the next step, so that another start at this one discards them, and none is there twice.
        self._add(comparison, progress.step + 1)

    def _make_sample_summaries(self, folder: Path) -> Iterator[Any]:
        """Yield the samples of a folder. Files that are damaged or have been deleted are left out."""
        # Tags contain the suffix: TensorBoard allows one kind per tag, and there may be sheet.png and sheet.gif.
        for path in find_media(folder, ".txt"):
            if (data := self._read(path)) is not None:
                yield make_text_summary(f"samples/{path.name}", data.decode("utf-8", errors="replace"))
        animations = find_media(folder, ".gif")
        videos = find_media(folder, ".mp4") if not animations else []
        for path in [*find_media(folder, ".png"), *animations, *find_media(folder, ".wav"), *videos]:
            data = self._read(path, render_film_strip if path.suffix == ".mp4" else Path.read_bytes)
            summary = make_media_summary(data, f"samples/{path.name}") if data else None
            if summary is not None:
                yield summary

    def _read(self, path: Path, read: Callable[[Path], bytes | None] = Path.read_bytes) -> bytes | None:
        try:
            return read(path)
        except OSError as error:
            if not self._has_warned:
                self.warn(f"cannot log {path} to TensorBoard: {error.strerror or error}; it is left out")
            self._has_warned = True
            return None

    def _add_scalars(self, group: str, values: Mapping[str, float], step: int) -> None:
        self._add([make_scalar_summary(f"{group}/{name}", value) for name, value in values.items()], step)

    def _add(self, summaries: list[Any], step: int) -> None:
        if self._events is not None and summaries:
            self._events.add(summaries, step)
