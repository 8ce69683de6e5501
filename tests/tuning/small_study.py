"""A small study of a text classifier, in this process or as a command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

import bottega
from small_texts import settings

SPACE = {"training.learning_rate": "log(1e-4, 1e-1)", "model.dropout": [0.0, 0.2, 0.5]}


def build_settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the recipe of a study; its length is 8 steps, evaluated at 4 and 8."""
    values = {**settings(folder / "data", "cnn"), "output_dir": str(folder / "runs"), "device": "cpu", "cpu_threads": 1}
    return {**values, **changes}


def tune(folder: Path, *, changes: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Run a study in `folder`/study and return its report."""
    arguments: dict[str, Any] = {"space": SPACE, "method": "random", "trials": 3, "jobs": 2, "out": folder / "study"}
    return bottega.tune("classify", build_settings(folder, **(changes or {})), **(arguments | options))


class TuneProcess:
    """`bottega tune` as a process of its own."""

    def __init__(self, folder: Path, *words: str, changes: dict[str, Any] | None = None) -> None:
        values = [f"{key}={json.dumps(value)}" for key, value in build_settings(folder, **(changes or {})).items()]
        space = [word for key, value in SPACE.items() for word in ("--space", f"{key}={format_values(value)}")]
        command = [
            "tune",
            "classify",
            *values,
            *space,
            "--method",
            "random",
            "--jobs",
            "2",
            "--out",
            str(folder / "study"),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bottega", *command, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )

    def list_trial_processes(self) -> list[psutil.Process]:
        """Return the running trials, which are direct children."""
        try:
            children = psutil.Process(self.process.pid).children()
            return [child for child in children if "train" in " ".join(child.cmdline())]
        except psutil.Error:
            return []

    def kill(self) -> None:
        """Kill the command without a chance to clean up."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def finish(self) -> tuple[int, str]:
        """Wait for the end; return exit code and output."""
        output, _ = self.process.communicate()
        return self.process.returncode, output


def format_values(values: Any) -> str:
    return values if isinstance(values, str) else json.dumps(values)


def find_processes(folder: Path) -> list[psutil.Process]:
    """Return every process whose command line names the folder."""
    processes = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in word for word in process.cmdline()) and process.pid != os.getpid():
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def wait_until(condition: Any, *, what: str, seconds: float = 120.0) -> None:
    """Wait for a condition; the limit only ends a test that hangs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.02)


def read_study(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "study" / "study.json").read_text()))
