"""A guard around a tracker: if the tracker fails, that is reported once and the run continues without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bottega.core.callback import Callback, Histogram, Progress
from bottega.core.errors import BottegaError


class TrackerGuard(Callback):
    """Passes every event on to a tracker, until one raises; from then on only `finish`, which closes files and connections.

    Only trackers are guarded: an error of any other callback, such as early stopping, belongs to the run.
    """

    def __init__(self, tracker: Callback, warn: Callable[[str], None]) -> None:
        self.tracker, self.warn = tracker, warn
        self.name = tracker.name
        self._is_active = True
        self._state: dict[str, Any] = {}

    def start(self, progress: Progress) -> None:
        self._call("start", progress)

    def after_step(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._call("after_step", progress, metrics)

    def after_inspect(self, progress: Progress, modules: Mapping[str, Mapping[str, float]]) -> None:
        self._call("after_inspect", progress, modules)

    def after_histograms(self, progress: Progress, histograms: Mapping[str, Histogram]) -> None:
        self._call("after_histograms", progress, histograms)

    def after_eval(self, progress: Progress, metrics: dict[str, float]) -> None:
        self._call("after_eval", progress, metrics)

    def after_sample(self, progress: Progress, folder: Path) -> None:
        self._call("after_sample", progress, folder)

    def after_save(self, progress: Progress, folder: Path) -> None:
        self._call("after_save", progress, folder)

    def rewind(self, progress: Progress) -> None:
        self._call("rewind", progress)

    def finish(self, progress: Progress, error: BaseException | None) -> None:
        try:
            self.tracker.finish(progress, error)
        except Exception as failure:
            self._switch_off(failure)

    def state_dict(self) -> dict[str, Any]:
        """Return the tracker's state, also of one that has failed, so that the next start continues what it tracked."""
        try:
            self._state = self.tracker.state_dict()
        except Exception as error:
            self._switch_off(error)
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state
        self._call("load_state_dict", state)

    def _call(self, event: str, *arguments: Any) -> None:
        if not self._is_active:
            return
        try:
            getattr(self.tracker, event)(*arguments)
        except Exception as error:
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        if self._is_active:
            self.warn(f"{self.name} logging failed: {describe_failure(error)}; training continues without it")
        self._is_active = False


def describe_failure(error: Exception) -> str:
    """Return a reason to print: an error of our own in its words, any other by its type, as its text may contain an address."""
    if isinstance(error, BottegaError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
