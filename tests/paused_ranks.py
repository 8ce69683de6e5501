"""`bottega train` under torchrun with a rank that pauses for longer than a silent one may, in the ways real work does.

The limits of the heartbeat are made short, so that a pause of seconds is as long as one of minutes.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

from bottega.engines.torch import engine as torch
from bottega.engines.torch import heartbeat

PAUSE = 3.0


def compute(seconds: float) -> None:
    """As a compiler does that is written in Python."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


def keep_the_interpreter(seconds: float) -> None:
    """As a library does that reads a large file without letting other threads run."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


KINDS = (time.sleep, compute, keep_the_interpreter)


def main() -> int:
    heartbeat.BEAT, heartbeat.SILENT, heartbeat.GRACE, heartbeat.TICK = 0.1, 1.0, 0.5, 0.05
    pauses, rank = int(os.environ.get("PAUSES", 0)), int(os.environ["RANK"])
    step = torch.TorchEngine.train_step

    def paused(self, number, batch):  # type: ignore[no-untyped-def]
        if number < pauses and number % 2 == rank:
            KINDS[number // 2 % len(KINDS)](PAUSE)
        return step(self, number, batch)

    torch.TorchEngine.train_step = paused  # type: ignore[method-assign]
    from bottega.cli import main as run_command

    words = sys.argv[1:]
    return run_command(words[2:] if words[:2] == ["-m", "bottega"] else words)


if __name__ == "__main__":
    sys.exit(main())
