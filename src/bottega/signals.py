"""Signals: between steps a flag that the loop reads, anywhere else an exception; a second one ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import ClassVar, NoReturn

from bottega.world import World

ECHO_SECONDS = 5.0
"""Seconds within which a second signal is the first one again, where there are several ranks."""

REQUEUE_EXIT_CODE = 85
"""Exit code for "saved, start me again": what a scheduler that pre-empts wants to see."""

HANDLER_TIMEOUT = 5.0
"""Seconds that a library may keep the main thread before a signal is obeyed without it."""


class StopRequested(KeyboardInterrupt):
    """A signal that came while there was nothing to save. Like Ctrl-C, it passes through `except Exception`."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; the same command goes on from what is saved")
        self.code = get_exit_code(number)


class WaitInterrupted(Exception):
    """A signal asks for a stop, and what is waited for may not come for long."""


def raise_if_stopping() -> None:
    """Raise StoppedWaiting where the loop was asked to stop and this is its thread.

    Not where there are several ranks: they stop after the same step, and the others may be in the middle of it.
    """
    if threading.current_thread() is threading.main_thread() and World.from_environment().size == 1:
        current = StopSignals.current
        if current is not None and current.received is not None:
            raise StopRequested(current.received) if isinstance(current, CommandSignals) else WaitInterrupted


def get_exit_code(number: int | None) -> int:
    return 130 if number == signal.SIGINT else REQUEUE_EXIT_CODE


class StopSignals:
    """A context in which SIGTERM, SIGUSR1, SIGHUP and Ctrl-C set `received` in place of ending the process."""

    HANDLED_SIGNALS = tuple(  # Windows has two of them
        getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP") if hasattr(signal, name)
    )
    current: ClassVar[StopSignals | None] = None
    """The innermost context that is open."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._first = 0.0
        self._before: dict[int, object] = {}
        self._outer: StopSignals | None = None
        self._is_leaving = False
        """Whether an error is on its way out, which nothing may take the place of."""

    def __enter__(self) -> StopSignals:
        # Python delivers signals to the main thread only; elsewhere (a notebook's worker) there is nothing to catch.
        if threading.current_thread() is not threading.main_thread():
            return self
        self._outer, StopSignals.current = StopSignals.current, self
        if self._outer is not None:  # somebody may have swallowed the exception of an outer one
            self.received, self._first = self._outer.received, self._outer._first
        for kind in self.HANDLED_SIGNALS:
            if kind == signal.SIGHUP and signal.getsignal(kind) == signal.SIG_IGN:
                continue  # nohup: the run is to outlive its terminal
            self._before[kind] = signal.signal(kind, self._catch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if StopSignals.current is self:
            StopSignals.current = self._outer
        if self._outer is not None:
            self._outer.received, self._outer._first = self.received, self._first
            self._outer._is_leaving = error is not None
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def exit_code(self) -> int:
        return get_exit_code(self.received)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is not None and _is_echo(now - self._first):
            return
        if self.received is not None:
            exit_immediately(
                "second signal, stopping now; the last checkpoint stands", 130 if number == signal.SIGINT else 143
            )
        self.received, self._first = signal.Signals(number), now
        self._obey(number)

    def _obey(self, number: int) -> None:
        """Nothing here: whoever opened the context reads `received`."""


class CommandSignals(StopSignals):
    """The context around a whole command: a signal raises StopRequested wherever the main thread is.

    A library may keep that thread for minutes without running any Python, and Python runs handlers there only. The
    system writes each signal to a socket as well; a thread reads it and leaves where nobody else does.
    """

    def __enter__(self) -> CommandSignals:
        super().__enter__()
        if self._before:
            self._ours, theirs = os.pipe()
            os.set_blocking(theirs, False)
            self._theirs = theirs
            self._wakeup = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, name="bottega-signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._theirs)  # ends the thread
        super().__exit__(kind, error, trace)

    def _obey(self, number: int) -> None:
        if not self._is_leaving:
            raise StopRequested(number)

    def _watch(self) -> None:
        with open(self._ours, "rb", buffering=0) as signals:
            while sent := signals.read(1):
                number = sent[0]
                if number not in self._before or StopSignals.current is not self:
                    continue  # the loop has taken over, and stops between two steps
                until = time.monotonic() + HANDLER_TIMEOUT
                while time.monotonic() < until and self.received is None:
                    time.sleep(0.05)
                if self.received is None and StopSignals.current is self:
                    exit_immediately(str(StopRequested(number)), get_exit_code(number))


def exit_immediately(reason: str | None, code: int) -> NoReturn:
    """End the process without waiting for any of its threads, after a line for people."""
    line = f"bottega: {reason}\n" if reason is not None else ""
    try:
        os.write(2, (f"\x1b[?25h\n{line}" if os.isatty(2) else line).encode())  # a live line has hidden the cursor
    except OSError:
        pass
    os._exit(code)


def _is_echo(seconds: float) -> bool:
    """A scheduler or a terminal signals all processes and a launcher passes it on: ranks hear the same request twice."""
    return seconds < ECHO_SECONDS and World.from_environment().size > 1
