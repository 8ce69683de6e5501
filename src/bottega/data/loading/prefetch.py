"""Batches before they are asked for: in this thread, in one behind it, or in processes of their own.

The stream is `make(start), make(start + 1), ...` whichever way it is built; a worker that is killed or stopped is replaced
and its steps are built again.
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

# Killed workers are replaced this often in one stream; more than that is no accident.
RESTARTS = 5
PACKAGE_ROOT = str(Path(__file__).parents[2])
# The step a worker is building and the one after it, so that it never waits for an order.
AHEAD = 2
TICK = 0.5
"""Seconds between two looks at what a batch is waited for."""
STOPPED = 5.0
"""Seconds after which a worker that a signal has stopped is replaced."""
SLOW = 15.0
"""Seconds of waiting for one batch after which a person is told; then each time it has doubled."""

BatchFunction = Callable[[int], Batch]
WarnCallback = Callable[[str], None]
Stream = Generator[Batch, None, None]


def prefetch(make: BatchFunction, start: int, *, workers: int, depth: int, warn: WarnCallback = print_notice) -> Stream:
    """The batches from `start` on. `workers` processes build them; a thread keeps up to `depth` of them ready.

    Raises StoppedWaiting where a signal asks for a stop while a batch of another process or thread is waited for.
    """
    closed = threading.Event()
    stream = _from_processes(make, start, workers, closed, warn) if workers else _inline(make, start)
    return _behind(stream, depth, closed) if depth else stream


def _inline(make: BatchFunction, start: int) -> Stream:
    for step in count(start):
        yield make(step)


def _behind(stream: Stream, depth: int, closed: threading.Event) -> Stream:
    """A thread that runs the stream. It ends when this generator is closed, or forgotten and collected."""
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
            # A generator belongs to the thread that runs it, so it is closed here too.
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
        # The collector may run this in the filling thread itself. A batch that takes longer than this is abandoned.
        if thread is not threading.current_thread():
            thread.join(timeout=10)


class _WorkerDied(Exception):
    """The process ended before it delivered."""


class _Worker:
    """One process and the steps it still owes."""

    def __init__(self, make: BatchFunction) -> None:
        here, there = socket.socketpair()
        with there:
            command = [sys.executable, "-P", "-c", COMMAND, str(there.fileno()), PACKAGE_ROOT]
            try:
                # A group of its own, so that Ctrl-C does not reach it before it has learned to ignore it.
                self.process = subprocess.Popen(
                    command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, process_group=0
                )
            except OSError as error:
                here.close()
                raise EnvironmentProblem(
                    f"a loader worker cannot be started: {error.strerror}; lower data.workers"
                ) from error
        # Once a message has begun, the rest of it is on its way; if not, the worker was stopped in the middle of it.
        limit = struct.pack("ll", int(STOPPED), int(STOPPED % 1 * 1e6))
        here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.connection = Connection(here.detach())
        self.receiver = Receiver(self.connection)
        self.owes: deque[int] = deque()
        try:
            self.connection.send(sys.path)
            self.connection.send(make)
        except OSError:
            pass  # it died at once: noticed, like any death, when its first batch is asked for
        except Exception as error:
            self.close()
            raise UsageError(f"the data cannot be sent to worker processes ({error}); set data.workers=0") from error

    def order(self, step: int) -> None:
        self.owes.append(step)
        with suppress(OSError):  # dead: noticed when this step is asked for
            self.connection.send((step, self.receiver.take_freed()))

    def deliver(self, closed: threading.Event, warn: WarnCallback) -> Batch:
        """The batch of the oldest step it owes."""
        try:
            self._wait(closed, warn)
            batch, error = self.receiver.receive()
        except BlockingIOError as broken:
            warn(self._stopped())
            raise _WorkerDied from broken
        except (EOFError, OSError) as broken:
            raise _WorkerDied from broken
        if error is not None:
            raise error
        self.owes.popleft()
        return batch

    def _wait(self, closed: threading.Event, warn: WarnCallback) -> None:
        """Until something has come. A worker that is stopped in the middle of it sends nothing more and is given up."""
        waited, due = 0.0, SLOW
        while not self.connection.poll(TICK):
            waited += TICK  # not by the clock: we may have been stopped as well
            if closed.is_set():
                raise _WorkerDied
            raise_if_stopping()
            if waited >= STOPPED and is_stopped(self.process.pid):
                warn(self._stopped())
                raise _WorkerDied
            if waited >= due:
                due *= 2
                warn(f"loader worker {self.process.pid} has sent nothing for {waited:.0f} s; still waiting for it")

    def _stopped(self) -> str:
        why = "was stopped by a signal (SIGSTOP)" if is_stopped(self.process.pid) else "does not finish a message"
        return f"loader worker {self.process.pid} {why}; another one takes its place"

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


def is_stopped(process: int) -> bool:
    """Whether a signal has stopped a process; False where the system does not tell."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def _from_processes(
    make: BatchFunction, start: int, workers: int, closed: threading.Event, warn: WarnCallback
) -> Stream:
    """Step s comes from worker s % workers. Each has a socket of its own, so a death in mid-message hurts no other.

    (In concurrent.futures all workers share one result pipe: one killed while it writes there stops the others.)
    """
    crew: list[_Worker] = []
    restarts = 0
    try:
        for _ in range(workers):
            crew.append(_Worker(make))
        for step in range(start, start + AHEAD * workers):
            crew[step % workers].order(step)
        for step in count(start):
            while True:
                worker = crew[step % workers]
                try:
                    batch = worker.deliver(closed, warn)
                    break
                except _WorkerDied:
                    if closed.is_set():
                        return
                    restarts += 1
                    crew[step % workers] = _replace(worker, make, restarts)
            worker.order(step + AHEAD * workers)
            yield batch
    finally:
        for worker in crew:
            worker.close()


def _replace(worker: _Worker, make: BatchFunction, restarts: int) -> _Worker:
    worker.close()
    if restarts > RESTARTS:
        raise EnvironmentProblem(
            f"loader workers died {restarts} times (the last: exit status {worker.process.returncode} at step "
            f"{worker.owes[0]}); give the machine more memory, lower data.workers, or set data.workers=0"
        )
    fresh = _Worker(make)
    for step in worker.owes:
        fresh.order(step)
    return fresh
