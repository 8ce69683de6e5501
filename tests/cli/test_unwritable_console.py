"""An unwritable console: training continues, signals save, and the exit code is unchanged."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bottega import terminal
from bottega.callbacks.console import Console
from bottega.core import checkpoint
from bottega.core.callback import Progress
from small_run import command, environment, read_logged_steps, train_arguments
from warm_process import WarmCommand

ENDLESS = {"training.max_steps": 1_000_000, "checkpoint.every": None, "evaluation.every": None}
SINKS = ("full", "closed", "gone")


@contextmanager
def open_unwritable(kind: str) -> Iterator[Any]:
    """Yield a file whose every write fails (full disk, broken pipe), or None for a closed standard error."""
    if kind == "full":
        with open("/dev/full", "w") as full:
            yield full
    elif kind == "gone":
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            yield pipe
    else:
        yield None


def start_command(arguments: list[str], sink: Any) -> subprocess.Popen[str] | WarmCommand:
    if sink is not None:
        return WarmCommand(arguments, env=environment(), stderr=sink)
    line = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command(arguments)]
    return subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("kind", SINKS)
def test_training_continues(tmp_path: Path, text_file: Path, kind: str) -> None:
    with open_unwritable(kind) as sink:
        process = start_command(train_arguments(tmp_path, text_file, "--json", name="x"), sink)
        out, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    assert '"step": 8' in out, "standard output is unaffected"
    assert read_logged_steps(tmp_path / "x") == list(range(1, 9))
    log = (tmp_path / "x" / "log.txt").read_text()
    assert "8 steps in" in log
    assert log.count("cannot write to standard error") == (kind != "closed")


@pytest.mark.parametrize(("kind", "number", "code"), [("gone", signal.SIGINT, 130), ("full", signal.SIGTERM, 85)])
def test_a_signal_still_saves(tmp_path: Path, text_file: Path, kind: str, number: int, code: int) -> None:
    """As Ctrl-C on `train ... 2>&1 | tee log`, which also ends tee."""
    metrics = tmp_path / "x" / "metrics.jsonl"
    with open_unwritable(kind) as sink:
        process = start_command(train_arguments(tmp_path, text_file, name="x", **ENDLESS), sink)
    deadline = time.monotonic() + 100
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None, process.returncode
        assert time.monotonic() < deadline, "training did not start"
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    last = checkpoint.read_link(tmp_path / "x" / "checkpoints", "last")
    assert last is not None
    assert checkpoint.verify(last).step == len(read_logged_steps(tmp_path / "x"))


@pytest.mark.parametrize("kind", SINKS)
def test_an_error_has_its_exit_code(tmp_path: Path, text_file: Path, kind: str) -> None:
    with open_unwritable(kind) as sink:
        process = start_command(train_arguments(tmp_path, text_file.parent / "absent.txt", name="x"), sink)
        process.communicate(timeout=100)
    assert process.returncode == 3


def test_unwritable_standard_output() -> None:
    """`| head` closes the pipe, which is not an error; a full disk loses the output, which is."""
    with open_unwritable("gone") as pipe:
        done = subprocess.run(command(["schema"]), env=environment(), stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    with open_unwritable("full") as full:
        done = subprocess.run(command(["schema"]), env=environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (5, "bottega: standard output: No space left on device\n")


def test_progress_line_on_a_closed_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """rich draws in a thread and would end the process when the pipe is closed."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(terminal.ConsoleStream, "isatty", lambda self: True)
    with open_unwritable("gone") as pipe:
        pipe.reconfigure(line_buffering=True)
        monkeypatch.setattr("sys.stderr", pipe)
        console = Console(unit="tokens", log=tmp_path / "log.txt")
        progress = Progress(step=1, total=2)
        console.start(progress)
        metrics = dict.fromkeys(("loss", "learning_rate", "grad_norm", "units_per_second", "data_wait"), 0.5)
        console.after_step(progress, {**metrics, "step_seconds": 1.0})
        console.after_eval(progress, {"loss": 1.0})
        console.finish(progress, None)
        monkeypatch.undo()
        terminal.drop_unwritable_output()
        with pytest.raises(BrokenPipeError):
            pipe.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), pipe.fileno())
    assert "cannot write to standard error (Broken pipe)" in (tmp_path / "log.txt").read_text()
