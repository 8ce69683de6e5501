"""Stop signals: a flag that the trainer reads between steps, an exception elsewhere; a second signal exits immediately."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import ClassVar, NoReturn

from bottega.stop_with_parent import stops_with_parent
from bottega.world import World

ECHO_SECONDS = 5.0
"""Seconds within which several ranks treat a second signal as a repetition of the first."""

REQUEUE_EXIT_CODE = 85
"""Exit code for "saved, start again", for schedulers that preempt jobs."""

HANDLER_TIMEOUT_SECONDS = 5.0
"""Seconds for which a library may block the main thread before a signal ends the process without waiting for its handler."""


class StopRequested(KeyboardInterrupt):
    """A signal arrived while there was nothing to save. Like KeyboardInterrupt, `except Exception` does not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(
            f"stopped by {signal.Signals(number).name}; run the same command again; it continues from what was saved, if anything was"
        )
        self.code = get_exit_code(number)


class WaitInterrupted(Exception):
    """A stop signal arrived during a wait that may take long."""


def raise_if_stopping() -> None:
    """Raise WaitInterrupted if a stop signal has arrived during training, or StopRequested outside of it.

    Only the main thread raises. With several ranks none does: all ranks stop after the same step, and the others may be in the
    middle of it.
    """
    if threading.current_thread() is threading.main_thread() and World.from_environment().size == 1:
        current = StopSignals.current
        if current is not None and current.received is not None:
            raise StopRequested(current.received) if isinstance(current, CommandSignals) else WaitInterrupted


def get_exit_code(number: int | None) -> int:
    """Return the exit code after a signal: 130 after Ctrl-C, otherwise the code that asks a scheduler to start the job again."""
    return 130 if number == signal.SIGINT else REQUEUE_EXIT_CODE


class StopSignals:
    """A context in which SIGTERM, SIGUSR1, SIGHUP and Ctrl-C set `received` instead of ending the process."""

    HANDLED_SIGNALS = tuple(  # Windows has only two of them
        getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP") if hasattr(signal, name)
    )
    current: ClassVar[StopSignals | None] = None
    """The innermost open context."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._stops_with_parent = False
        self._previous_handlers: dict[int, object] = {}
        self._outer: StopSignals | None = None
        self._is_leaving = False
        """Whether an inner context ended with an exception, which StopRequested must not replace while it propagates."""

    def __enter__(self) -> StopSignals:
        # Python delivers signals to the main thread only; other threads (a notebook's worker) have nothing to catch.
        if threading.current_thread() is not threading.main_thread():
            return self
        self._outer, StopSignals.current = StopSignals.current, self
        if self._outer is not None:  # the exception of an outer context may have been swallowed
            self.received, self._received_at = self._outer.received, self._outer._received_at
        self._stops_with_parent = stops_with_parent()
        for number in self.HANDLED_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the run must outlive its terminal
            self._previous_handlers[number] = signal.signal(number, self._catch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if StopSignals.current is self:
            StopSignals.current = self._outer
        if self._outer is not None:
            self._outer.received, self._outer._received_at = self.received, self._received_at
            self._outer._is_leaving = error is not None
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def exit_code(self) -> int:
        """The exit code after the received signal."""
        return get_exit_code(self.received)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is not None and (
            # The kernel repeats SIGTERM for each thread of a dying parent; Ctrl-C and SIGKILL still end the process.
            (number == signal.SIGTERM and self._stops_with_parent) or _is_echo(now - self._received_at)
        ):
            return
        if self.received is not None:
            exit_immediately(
                "second signal, stopping now without saving; the last checkpoint is kept",
                130 if number == signal.SIGINT else 143,
            )
        self.received, self._received_at = signal.Signals(number), now
        self._handle(number)

    def _handle(self, number: int) -> None:
        """Do nothing: the code inside the context reads `received`."""


class CommandSignals(StopSignals):
    """The context of a whole command: a signal raises StopRequested in the main thread.

    Python runs handlers in the main thread only, and a library may block it for minutes. Each signal is therefore also written
    to a pipe, which a watcher thread reads; it ends the process if the handler has not run in time.
    """

    def __enter__(self) -> CommandSignals:
        super().__enter__()
        if self._previous_handlers:
            self._read_end, write_end = os.pipe()
            os.set_blocking(write_end, False)
            self._write_end = write_end
            self._previous_wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, name="bottega-signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous_handlers:
            signal.set_wakeup_fd(self._previous_wakeup)
            os.close(self._write_end)  # ends the thread
        super().__exit__(kind, error, trace)

    def _handle(self, number: int) -> None:
        if not self._is_leaving:
            raise StopRequested(number)

    def _watch(self) -> None:
        with open(self._read_end, "rb", buffering=0) as signals:
            while byte := signals.read(1):
                number = byte[0]
                if number not in self._previous_handlers or StopSignals.current is not self:
                    continue  # the trainer has taken over, and stops between two steps
                deadline = time.monotonic() + HANDLER_TIMEOUT_SECONDS
                while time.monotonic() < deadline and self.received is None:
                    time.sleep(0.05)
                if self.received is None and StopSignals.current is self:
                    exit_immediately(str(StopRequested(number)), get_exit_code(number))


def exit_immediately(reason: str | None, code: int) -> NoReturn:
    """Print `reason` to standard error and end the process without waiting for its threads."""
    line = f"bottega: {reason}\n" if reason is not None else ""
    try:
        # The escape code shows the cursor, which a progress bar may have hidden.
        os.write(2, (f"\x1b[?25h\n{line}" if os.isatty(2) else line).encode())
    except OSError:
        pass
    os._exit(code)


def _is_echo(seconds_since_first: float) -> bool:
    """Whether ranks received the same signal twice: from the scheduler or terminal, and passed on by the launcher."""
    return seconds_since_first < ECHO_SECONDS and World.from_environment().size > 1
