"""Build batches on request in this thread, or ahead of time in a background thread or worker processes.

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

# Dead workers are replaced this many times in one stream; more deaths have a cause that a restart does not remove.
MAX_RESTARTS = 5
PACKAGE_ROOT = str(Path(__file__).parents[2])
# Steps given to a worker at once: the step that it builds and its next one, so that it is never idle.
REQUESTS_PER_WORKER = 2
POLL_SECONDS = 0.5
"""Seconds between two checks while waiting for a batch."""
STOPPED_SECONDS = 5.0
"""Seconds after which a worker stopped by a signal is replaced."""
FIRST_WARNING_SECONDS = 15.0
"""Seconds of waiting for one batch until the first warning; each further warning comes after twice as long."""

BatchFunction = Callable[[int], Batch]
WarnCallback = Callable[[str], None]
Stream = Generator[Batch, None, None]


def prefetch(make: BatchFunction, start: int, *, workers: int, depth: int, warn: WarnCallback = print_notice) -> Stream:
    """Yield the batches from `start` on, built by `workers` processes; a thread keeps up to `depth` of them ready.

    Raises WaitInterrupted if a signal requests a stop while it waits for another process or thread.
    """
    closed = threading.Event()
    stream = _build_in_processes(make, start, workers, closed, warn) if workers else _build_inline(make, start)
    return _run_in_thread(stream, depth, closed) if depth else stream


def _build_inline(make: BatchFunction, start: int) -> Stream:
    for step in count(start):
        yield make(step)


def _run_in_thread(stream: Stream, depth: int, closed: threading.Event) -> Stream:
    """Run the stream in a thread, which ends when this generator is closed or garbage-collected."""
    queue: deque[Batch | Exception] = deque()
    changed = threading.Condition()

    def put(item: Batch | Exception) -> bool:
        with changed:
            changed.wait_for(lambda: len(queue) < depth or closed.is_set())
            queue.append(item)
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
                while not changed.wait_for(lambda: queue, timeout=POLL_SECONDS):
                    raise_if_stopping()
                item = queue.popleft()
                changed.notify_all()
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        with changed:
            closed.set()
            changed.notify_all()
        # The garbage collector may run this in the filling thread itself, which cannot join itself. A batch that takes longer
        # than the timeout is abandoned.
        if thread is not threading.current_thread():
            thread.join(timeout=10)


class _WorkerDied(Exception):
    """The process ended, or was stopped by a signal, before it sent its batch; or the stream was closed."""


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
        # A timeout in the middle of a message means that the worker was stopped while it was sending.
        timeout = struct.pack("ll", int(STOPPED_SECONDS), int(STOPPED_SECONDS % 1 * 1e6))
        parent_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
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
            warn(self._describe_stop())
            raise _WorkerDied from broken
        except (EOFError, OSError) as broken:
            raise _WorkerDied from broken
        if error is not None:
            raise error
        self.pending.popleft()
        return batch

    def _wait(self, closed: threading.Event, warn: WarnCallback) -> None:
        """Wait for data. Raises _WorkerDied if a signal has stopped the worker, or if the stream is closed."""
        seconds_waited, next_warning = 0.0, FIRST_WARNING_SECONDS
        while not self.connection.poll(POLL_SECONDS):
            seconds_waited += POLL_SECONDS  # not by the clock: this process may have been stopped as well
            if closed.is_set():
                raise _WorkerDied
            raise_if_stopping()
            if seconds_waited >= STOPPED_SECONDS and is_stopped(self.process.pid):
                warn(self._describe_stop())
                raise _WorkerDied
            if seconds_waited >= next_warning:
                next_warning *= 2
                warn(
                    f"loader worker {self.process.pid} has sent nothing for {seconds_waited:.0f} s; still waiting for it"
                )

    def _describe_stop(self) -> str:
        reason = "was stopped by a signal (SIGSTOP)" if is_stopped(self.process.pid) else "does not finish a message"
        return f"loader worker {self.process.pid} {reason}; starting another one in its place"

    def close(self) -> None:
        """Kill the process."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process; False on systems without /proc."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def _build_in_processes(
    make: BatchFunction, start: int, workers: int, closed: threading.Event, warn: WarnCallback
) -> Stream:
    """Yield batches of worker processes; worker s % workers builds step s.

    Each worker has its own socket, so that a worker that dies in the middle of a message affects no other. (In
    concurrent.futures all workers share one result pipe, and a worker killed while it writes there blocks the others.)
    """
    pool: list[_Worker] = []
    num_restarts = 0
    try:
        for _ in range(workers):
            pool.append(_Worker(make))
        for step in range(start, start + REQUESTS_PER_WORKER * workers):
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
                    num_restarts += 1
                    pool[step % workers] = _replace_worker(worker, make, num_restarts)
            worker.request(step + REQUESTS_PER_WORKER * workers)
            yield batch
    finally:
        for worker in pool:
            worker.close()


def _replace_worker(worker: _Worker, make: BatchFunction, num_restarts: int) -> _Worker:
    worker.close()
    if num_restarts > MAX_RESTARTS:
        raise EnvironmentProblem(
            f"loader workers died {num_restarts} times (the last: exit status {worker.process.returncode} at step "
            f"{worker.pending[0]}); give the machine more memory, lower data.workers, or set data.workers=0"
        )
    replacement = _Worker(make)
    for step in worker.pending:
        replacement.request(step)
    return replacement
