"""Build batches ahead of time: in this thread, in a background thread, or in worker processes.

The stream is `make(start), make(start + 1), ...` in each case; a worker that is killed or stopped is replaced, and its
steps are built again.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.core.types import Batch
from bottega.data.loading.transfer import Receiver
from bottega.data.loading.worker import COMMAND
from bottega.signals import raise_if_stopping
from bottega.terminal import print_notice

# Workers that die are replaced this many times in one stream; more is not an accident.
MAX_RESTARTS = 5
PACKAGE_ROOT = str(Path(__file__).parents[2])
# The step a worker is building and the next, so that it is never idle.
AHEAD = 2
TICK = 0.5
"""Seconds between two checks while waiting for a batch."""
STOPPED = 5.0
"""Seconds after which a worker stopped by a signal is replaced."""
SLOW = 15.0
"""Seconds of waiting for one batch until the first warning; the interval then doubles."""

BatchFunction = Callable[[int], Batch]
WarnCallback = Callable[[str], None]
Stream = Generator[Batch, None, None]


def prefetch(make: BatchFunction, start: int, *, workers: int, depth: int, warn: WarnCallback = print_notice) -> Stream:
    """Yield the batches from `start` on, built by `workers` processes; a thread keeps up to `depth` of them ready.

    Raises WaitInterrupted if a signal requests a stop while it waits for another process or thread.
    """
    closed = threading.Event()
    stream = _from_processes(make, start, workers, closed, warn) if workers else _inline(make, start)
    return _in_thread(stream, depth, closed) if depth else stream


def _inline(make: BatchFunction, start: int) -> Stream:
    for step in count(start):
        yield make(step)


def _in_thread(stream: Stream, depth: int, closed: threading.Event) -> Stream:
    """Run the stream in a thread, which ends when this generator is closed or garbage-collected."""
    ready: deque[Batch | Exception] = deque()
    changed = threading.Condition()

    def put(item: Batch | Exception) -> bool:
        with changed:
            changed.wait_for(lambda: len(ready) < depth or closed.is_set())
            ready.append(item)
            changed.notify_all()
        return not closed.is_set()

    def fill() -> None:
        try:
            # A generator must be closed in the thread that runs it.
            for item in stream:
                if not put(item):
                    break
        except Exception as error:
            put(error)
        finally:
            stream.close()

    thread = threading.Thread(target=fill, name="bottega-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            with changed:
                while not changed.wait_for(lambda: ready, timeout=TICK):
                    raise_if_stopping()
                item = ready.popleft()
                changed.notify_all()
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        with changed:
            closed.set()
            changed.notify_all()
        # The garbage collector may run this in the filling thread itself. A batch that takes longer is abandoned.
        if thread is not threading.current_thread():
            thread.join(timeout=10)


class _WorkerDied(Exception):
    """The process ended before it sent its batch."""


class _Worker:
    """One worker process and the steps it was given but has not returned."""

    def __init__(self, make: BatchFunction) -> None:
        parent_socket, child_socket = socket.socketpair()
        with child_socket:
            command = [sys.executable, "-P", "-c", COMMAND, str(child_socket.fileno()), PACKAGE_ROOT]
            try:
                # In its own process group, so that Ctrl-C does not reach it before it ignores the signal.
                self.process = subprocess.Popen(
                    command, pass_fds=[child_socket.fileno()], stdin=subprocess.DEVNULL, process_group=0
                )
            except OSError as error:
                parent_socket.close()
                raise EnvironmentProblem(
                    f"a loader worker cannot be started: {error.strerror}; lower data.workers"
                ) from error
        # If a message has begun and does not end, the worker was stopped in the middle of it.
        limit = struct.pack("ll", int(STOPPED), int(STOPPED % 1 * 1e6))
        parent_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.connection = Connection(parent_socket.detach())
        self.receiver = Receiver(self.connection)
        self.pending: deque[int] = deque()
        try:
            self.connection.send(sys.path)
            self.connection.send(make)
        except OSError:
            pass  # it died at once, which is noticed when its first batch is received
        except Exception as error:
            self.close()
            raise UsageError(f"the data cannot be sent to worker processes ({error}); set data.workers=0") from error

    def request(self, step: int) -> None:
        """Send the worker a step to build."""
        self.pending.append(step)
        with suppress(OSError):  # a dead worker is noticed when this step is received
            self.connection.send((step, self.receiver.take_freed()))

    def receive(self, closed: threading.Event, warn: WarnCallback) -> Batch:
        """Return the batch of the oldest pending step."""
        try:
            self._wait(closed, warn)
            batch, error = self.receiver.receive()
        except BlockingIOError as broken:
            warn(self._stopped_message())
            raise _WorkerDied from broken
        except (EOFError, OSError) as broken:
            raise _WorkerDied from broken
        if error is not None:
            raise error
        self.pending.popleft()
        return batch

    def _wait(self, closed: threading.Event, warn: WarnCallback) -> None:
        """Wait for data. Raises _WorkerDied for a worker that a signal has stopped."""
        waited, next_warning = 0.0, SLOW
        while not self.connection.poll(TICK):
            waited += TICK  # not by the clock: this process may have been stopped as well
            if closed.is_set():
                raise _WorkerDied
            raise_if_stopping()
            if waited >= STOPPED and is_stopped(self.process.pid):
                warn(self._stopped_message())
                raise _WorkerDied
            if waited >= next_warning:
                next_warning *= 2
                warn(f"loader worker {self.process.pid} has sent nothing for {waited:.0f} s; still waiting for it")

    def _stopped_message(self) -> str:
        reason = "was stopped by a signal (SIGSTOP)" if is_stopped(self.process.pid) else "does not finish a message"
        return f"loader worker {self.process.pid} {reason}; starting another one in its place"

    def close(self) -> None:
        """Kill the process."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def is_stopped(process: int) -> bool:
    """Return whether a signal has stopped a process; False on systems without /proc."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def _from_processes(
    make: BatchFunction, start: int, workers: int, closed: threading.Event, warn: WarnCallback
) -> Stream:
    """Yield batches of worker processes; worker s % workers builds step s.

    Each has a socket of its own, so that a death in mid-message affects no other. (In concurrent.futures all workers
    share one result pipe: one killed while it writes there blocks the others.)
    """
    pool: list[_Worker] = []
    restarts = 0
    try:
        for _ in range(workers):
            pool.append(_Worker(make))
        for step in range(start, start + AHEAD * workers):
            pool[step % workers].request(step)
        for step in count(start):
            while True:
                worker = pool[step % workers]
                try:
                    batch = worker.receive(closed, warn)
                    break
                except _WorkerDied:
                    if closed.is_set():
                        return
                    restarts += 1
                    pool[step % workers] = _replace(worker, make, restarts)
            worker.request(step + AHEAD * workers)
            yield batch
    finally:
        for worker in pool:
            worker.close()


def _replace(worker: _Worker, make: BatchFunction, restarts: int) -> _Worker:
    worker.close()
    if restarts > MAX_RESTARTS:
        raise EnvironmentProblem(
            f"loader workers died {restarts} times (the last: exit status {worker.process.returncode} at step "
            f"{worker.pending[0]}); give the machine more memory, lower data.workers, or set data.workers=0"
        )
    replacement = _Worker(make)
    for step in worker.pending:
        replacement.request(step)
    return replacement
