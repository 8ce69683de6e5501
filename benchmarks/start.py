"""Start-up time of commands: CPU seconds of a separate process, median of several runs.

python benchmarks/start.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

ROUNDS = 7
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "bottega --help": ["-m", "bottega", "--help"],
    "bottega recipes": ["-m", "bottega", "recipes"],
    "bottega schema": ["-m", "bottega", "schema"],
    "import bottega.config.load": ["-c", "import bottega.config.load"],
}


def cpu_seconds(arguments: list[str]) -> float:
    """Return the CPU seconds of a child process, which other work on the machine does not affect."""
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, arguments
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    measured: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, arguments in COMMANDS.items():
            measured[name].append(cpu_seconds(arguments))
    for name, seconds in measured.items():
        print(f"{name:<28}{statistics.median(seconds):6.2f} s")
