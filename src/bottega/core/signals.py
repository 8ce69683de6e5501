"""Signals as a flag the loop reads between steps: the first asks for a save, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType

ECHO = 5.0
"""Seconds within which a second SIGTERM is the first one again, where there are several ranks."""

REQUEUE = 85
"""Exit code for "saved, start me again": what a scheduler that pre-empts wants to see."""


class StopSignals:
    """A context in which SIGTERM, SIGUSR1 and Ctrl-C set `received` in place of ending the process."""

    KINDS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._first = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        # Python delivers signals to the main thread only; elsewhere (a notebook's worker) there is nothing to catch.
        if threading.current_thread() is threading.main_thread():
            self._before = {kind: signal.signal(kind, self._catch) for kind in self.KINDS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def exit_code(self) -> int:
        return 130 if self.received == signal.SIGINT else REQUEUE

    def _catch(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is not None and _is_echo(number, now - self._first):
            return
        if self.received is not None:
            os.write(2, b"\x1b[?25h\nbottega: second signal, stopping now; the last checkpoint stands\n")
            os._exit(130 if number == signal.SIGINT else 143)
        self.received, self._first = signal.Signals(number), now


def _is_echo(number: int, seconds: float) -> bool:
    """A scheduler signals all processes and a launcher passes it on: ranks hear the same request twice."""
    return number == signal.SIGTERM and seconds < ECHO and int(os.environ.get("WORLD_SIZE", 1)) > 1
