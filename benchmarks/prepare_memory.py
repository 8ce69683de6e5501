"""Peak private memory of all processes, and time, of preparing a large text.

  python benchmarks/prepare_memory.py            # 2 GB of shuffled lines of the standard library's sources
  python benchmarks/prepare_memory.py --gb 0.2

Memory is sampled every 50 ms. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bottega.data.formats.embedded import list_standard_library


def write_text(path: Path, num_bytes: float) -> None:
    lines = [line for file in list_standard_library().files for line in file.read_text(encoding="utf-8").splitlines()]
    shuffle = random.Random(0)
    written = 0
    with path.open("w", encoding="utf-8") as out:
        while written < num_bytes:
            shuffle.shuffle(lines)
            written += out.write("\n".join(lines) + "\n")


def measure_private_bytes(process: psutil.Process) -> int:
    """Return the memory of a process and its descendants that no other process shares."""
    total = 0
    for member in (process, *process.children(recursive=True)):
        try:
            total += member.memory_full_info().uss
        except psutil.Error:  # the process has exited
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0)
    num_bytes = parser.parse_args().gb * 1e9
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "big.txt")
        write_text(path, num_bytes)
        command = [sys.executable, "-m", "bottega", "prepare", "language", "--data", str(path), "--json"]
        start, peak = time.monotonic(), 0
        process = psutil.Popen(command, env={**os.environ, "XDG_CACHE_HOME": folder}, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            try:
                peak = max(peak, measure_private_bytes(process))
            except psutil.Error:
                break
            time.sleep(0.05)
        seconds, code = time.monotonic() - start, process.wait()
        result = {"gb": path.stat().st_size / 1e9, "peak_mb": peak / 1e6, "seconds": seconds, "exit": code}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
