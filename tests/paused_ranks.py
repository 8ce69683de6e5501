"""`bottega train` under torchrun with a rank that pauses for longer than the heartbeat timeout, as real work does.

The timeouts of the heartbeat are shortened to seconds.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

from bottega.engines.torch import engine, heartbeat

PAUSE_SECONDS = 3.0


def compute(seconds: float) -> None:
    """Busy Python code, such as a compiler."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sum(range(1000))


def hold_gil(seconds: float) -> None:
    """A C call that holds the GIL, such as a library that reads a large file."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


PAUSES = (time.sleep, compute, hold_gil)
"""Functions that keep a rank busy for a number of seconds."""


def main() -> int:
    heartbeat.BEAT_SECONDS, heartbeat.SILENCE_TIMEOUT, heartbeat.GRACE_SECONDS, heartbeat.TICK_SECONDS = (
        0.1,
        1.0,
        0.5,
        0.05,
    )
    num_pauses, rank = int(os.environ.get("PAUSES", 0)), int(os.environ["RANK"])
    step = engine.TorchEngine.train_step

    def pause_and_step(self, number, batch, **options):  # type: ignore[no-untyped-def]
        if number < num_pauses and number % 2 == rank:
            PAUSES[number // 2 % len(PAUSES)](PAUSE_SECONDS)
        return step(self, number, batch, **options)

    engine.TorchEngine.train_step = pause_and_step  # type: ignore[method-assign]
    from bottega.cli import main as run_command

    arguments = sys.argv[1:]
    return run_command(arguments[2:] if arguments[:2] == ["-m", "bottega"] else arguments)


if __name__ == "__main__":
    sys.exit(main())
