"""A worker process that builds batches: it receives step numbers and sends their batches, in order.

It is started as `python -c` with a socket rather than through multiprocessing, which would run the user's script again
(and import torch with it) in every worker.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn

from bottega.core.errors import UsageError
from bottega.data.loading.transfer import Sender

COMMAND = (
    "import sys; sys.path.insert(0, sys.argv[2]); from bottega.data.loading.worker import main; main(int(sys.argv[1]))"
)


def main(descriptor: int) -> NoReturn:
    """Serve batches over the socket of this file descriptor until the other side closes it."""
    # Ctrl-C and the end of a terminal reach whole process groups, but the trainer decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The cores are divided among the processes already, so libraries with their own threads use one thread here.
    os.environ.update(BOTTEGA_WORKER="1", RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    connection = Connection(descriptor)
    make = _receive_function(connection)
    steps: queue.SimpleQueue[int] = queue.SimpleQueue()
    sender = Sender(connection)
    threading.Thread(target=_listen, args=(connection, steps, sender), daemon=True).start()
    while True:
        step = steps.get()
        _send(sender, *_build_batch(make, step))


def _build_batch(make: Callable[[int], object], step: int) -> tuple[object, Exception | None]:
    try:
        return make(step), None
    except Exception as error:
        return None, _make_picklable(error)


def _receive_function(connection: Connection) -> Callable[[int], object]:
    try:
        sys.path[:] = connection.recv()
        return connection.recv()
    except (EOFError, OSError):
        os._exit(0)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        remedy = "define its classes in an importable module, or set data.workers=0"
        problem = UsageError(f"a loader worker cannot load the data ({reason}); {remedy}")
        _send(Sender(connection), None, problem)
        os._exit(1)


def _listen(connection: Connection, steps: queue.SimpleQueue[int], sender: Sender) -> None:
    """Receive steps; end the process as soon as the other side is gone, even in the middle of a batch."""
    try:
        while True:
            step, freed_segments = connection.recv()
            sender.release(freed_segments)
            steps.put(step)
    except (EOFError, OSError):
        os._exit(0)


def _send(sender: Sender, batch: object, error: Exception | None) -> None:
    try:
        if error is None:
            sender.send(batch)
        else:
            sender.connection.send((None, error))
    except OSError:
        os._exit(0)
    except Exception as broken:  # not picklable; nothing was sent yet
        sender.connection.send((None, _to_text_error(broken)))


def _make_picklable(error: Exception) -> Exception:
    """Return a copy of the error with this process's traceback as a note; as text if the other side cannot rebuild it."""
    try:
        arguments = (*error.args[:2], error.filename) if isinstance(error, OSError) and error.filename else error.args
        copy = type(error)(*arguments)
    except Exception:
        return _to_text_error(error)
    if str(copy) != str(error):
        return _to_text_error(error)
    copy.add_note("In a loader worker:\n" + "".join(traceback.format_exception(error)))
    return copy


def _to_text_error(error: Exception) -> RuntimeError:
    return RuntimeError("a loader worker failed:\n" + "".join(traceback.format_exception(error)))
