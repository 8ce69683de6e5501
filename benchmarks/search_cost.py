"""Measure the CPU time of `bottega tune` itself while eight trials run, on a terminal and without one.

python benchmarks/search_cost.py [--seconds 60]
"""

from __future__ import annotations

import argparse
import os
import pty
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

JOBS = 8


def measure(folder: Path, *, seconds: float, on_terminal: bool) -> float:
    command = [
        *(sys.executable, "-m", "bottega", "tune", "classify/cnn", "training.max_steps=100000", "evaluation.every=20"),
        *("logging.every=1", "evaluation.max_batches=1", "--space", "training.learning_rate=log(1e-4,1e-2)"),
        *("--method", "random", "--pruner", "median", "--trials", str(JOBS), "--jobs", str(JOBS), "--out", str(folder)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if on_terminal:
        reader, writer = pty.openpty()
        process = subprocess.Popen(command, stdin=writer, stdout=writer, stderr=writer, env=environment)
        os.close(writer)
        os.set_blocking(reader, False)
    else:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    parent = psutil.Process(process.pid)

    def drain() -> None:
        if on_terminal:
            try:
                while os.read(reader, 65536):
                    pass
            except (BlockingIOError, OSError):
                pass

    try:
        metrics = [folder / "trials" / f"trial-{number:05d}" / "metrics.jsonl" for number in range(JOBS)]
        while not all(path.is_file() and path.stat().st_size for path in metrics):
            drain()
            time.sleep(0.2)
        before, start = parent.cpu_times(), time.monotonic()
        while time.monotonic() - start < seconds:
            drain()
            time.sleep(0.2)
        after, elapsed = parent.cpu_times(), time.monotonic() - start
        return (after.user + after.system - before.user - before.system) / elapsed
    finally:
        process.terminate()
        while process.poll() is None:
            drain()  # a full terminal would block its last words
            time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    for on_terminal in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            share = measure(Path(folder) / "study", seconds=arguments.seconds, on_terminal=on_terminal)
        print(f"{JOBS} trials, {'terminal' if on_terminal else 'no terminal'}: {share:.2%} of a core")


if __name__ == "__main__":
    main()
