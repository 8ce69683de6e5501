"""A process with injected file faults, one at a time: `python fault_process.py FOLDER TEXT FIRST STRIDE`.

The file operations FIRST, FIRST + STRIDE, ... of a training run fail, each in a run of its own. The process is started with
file_faults.c preloaded, imports everything, and forks a child for each fault, so that a fault costs
a small training run and not a start of Python. It prints one JSON line for each run that ends differently from an
undisturbed one, and a last line with the number of faults.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("file_faults.c")
RECIPE: dict[str, Any] = {
    # Which steps have module statistics depends on the clock, and so would the number of operations.
    "logging.modules": False,
    "name": "run",
    "training.learning_rate": 2.0,
    "training.max_steps": 10,
    "training.batch_size": 2,
    "training.scheduler.name": "constant",
    "training.scheduler.warmup_steps": 10,
    "training.ema": 0.25,
    "evaluation.every": 2,
    "checkpoint.every": 3,
    "checkpoint.keep": 1,
    "samples.every": 6,
    "samples.count": 1,
    "samples.max_new_tokens": 4,
}
"""The learning rate rises until it is far too high, so that the best checkpoint is neither the first nor the last."""
VARYING_METRICS = ("seconds", "per_second", "wait", "gib")
"""Endings of metric names whose values differ between equal runs: times and memory."""
KILL = 0
"""In place of an error number: the process is killed instead."""


def build_library(folder: Path) -> Path:
    """Compile file_faults.c; skip the test without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler (cc) to make file operations fail")
    library = folder / "file_faults.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library


def run_process(library: Path, *arguments: Any) -> list[dict[str, Any]]:
    """Run this script and return the JSON lines that it prints."""
    from small_run import environment

    command = [sys.executable, str(Path(__file__)), *map(str, arguments)]
    preloaded = environment(LD_PRELOAD=str(library))
    done = subprocess.run(command, env=preloaded, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


class Faults:
    """Interface to the preloaded library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.faults_counted.restype = ctypes.c_long

    def arm(self, folder: Path, *, number: int = 0, error: int = KILL, journal: int = -1) -> None:
        self._library.faults_arm(os.fsencode(folder), ctypes.c_long(number), error, journal)

    def make_unreadable(self, path: Path) -> None:
        self._library.faults_unreadable(os.fsencode(path))


def run_child(work: Callable[[], Any], log: Path) -> int:
    """Run `work` in a fork with its output in `log`; return the exit code as a shell reports it."""
    from bottega import cli

    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    code = 70
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        try:
            result = work()
            code = int(result or 0)
        except Exception as error:
            code = cli._report_error(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def hash_files(folder: Path) -> dict[str, str]:
    """Return relative path -> SHA-256 for every file below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def describe_run(run: Path) -> dict[str, Any]:
    """Return everything in a run directory that must not depend on faults."""
    from bottega.core import checkpoint
    from bottega.metrics_log import read_metrics

    result: dict[str, Any] = {}
    for name in ("last", "best"):
        link = checkpoint.read_link(run / "checkpoints", name)
        manifest = checkpoint.verify(link) if link is not None else None
        result[name] = [manifest.step, manifest.files] if manifest is not None else None
    rows = read_metrics(run / "metrics.jsonl")
    result["metrics"] = [{k: v for k, v in row.items() if not k.endswith(VARYING_METRICS)} for row in rows]
    result["export"] = hash_files(run / "final")
    result["samples"] = hash_files(run / "samples")
    for folder in (run, run / "checkpoints"):
        result[f"temporary files in {folder.name}"] = sorted(
            name for name in os.listdir(folder) if name.startswith(".")
        )
    return json.loads(json.dumps(result))


def find_differences(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [
        f"{key}: {actual[key]} instead of {expected[key]}"[:600] for key in expected if actual[key] != expected[key]
    ]


def select_operations(operations: list[str]) -> list[int]:
    """Return the numbers of all operations except writes between two others to the same file."""
    words = [line.split(" ", 2)[1:] for line in operations]
    is_inner = [
        0 < index < len(words) - 1 and word[0] == "write" and words[index - 1] == word == words[index + 1]
        for index, word in enumerate(words)
    ]
    return [number for number, inner in enumerate(is_inner, 1) if not inner]


class FaultTest:
    """Runs a command with one fault, then again until it finishes."""

    def __init__(self, folder: Path, text: Path) -> None:
        self.folder, self.text, self.faults = folder, text, Faults()
        self.run = folder / "run"
        self.log = folder / "log"
        self.train()  # in this process, so that every fork has imported all modules
        self.export()
        self.expected = describe_run(self.run)
        best, last = self.expected["best"][0], self.expected["last"][0]
        assert 0 < best < last, f"best {best} and last {last} should differ"

    def train(self) -> None:
        from small_run import train

        train(self.folder, self.text, **RECIPE)

    def export(self) -> None:
        import bottega

        bottega.load(self.run).export()

    def list_operations(self, work: Callable[[], Any]) -> list[str]:
        """Return descriptions of the file operations of an undisturbed run."""
        journal_path = self.folder / "operations"
        journal = os.open(journal_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

        def work_with_journal() -> Any:
            self.faults.arm(self.run, journal=journal)
            return work()

        assert run_child(work_with_journal, self.log) == 0, self.log.read_text()
        os.close(journal)
        return journal_path.read_text().splitlines()

    def run_with_fault(self, work: Callable[[], Any], number: int, error: int) -> int:
        """Return the exit code of `work` when its file operation `number`, counted from 1, fails with `error`."""

        def work_with_fault() -> Any:
            self.faults.arm(self.run, number=number, error=error)
            return work()

        return run_child(work_with_fault, self.log)

    def train_through_faults(self, first: int, stride: int) -> Iterator[dict[str, Any]]:
        shutil.rmtree(self.run)
        operations = self.list_operations(self.train)
        numbers = select_operations(operations)[first::stride]
        for error in (KILL, errno.EIO):
            for number in numbers:
                shutil.rmtree(self.run)
                self.log.unlink(missing_ok=True)
                codes = [self.run_with_fault(self.train, number, error)]
                while codes[-1] or len(codes) == 1:
                    codes.append(run_child(self.train, self.log))
                    if len(codes) > 3:
                        break
                codes.append(run_child(self.export, self.log))
                allowed_codes = [{128 + signal.SIGKILL} if error == KILL else {0, 5}, {0}, {0}]
                problems = find_differences(describe_run(self.run), self.expected) if not codes[-1] else []
                if (
                    not all(code in expected for code, expected in zip(codes, allowed_codes, strict=False))
                    or len(codes) != 3
                ):
                    problems.append(f"exit codes {codes}: {self.log.read_text()[-600:]}")
                if problems:
                    yield {"error": error, "operation": operations[number - 1], "problems": problems}
        yield {"faults": 2 * len(numbers)}


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    folder, text, first, stride = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    import torch

    torch.set_num_threads(1)
    for problem in FaultTest(folder, text).train_through_faults(first, stride):
        sys.stdout.write(json.dumps(problem) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
