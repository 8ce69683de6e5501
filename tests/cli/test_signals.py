"""Signals to a training process: the first saves and exits with a code for schedulers, the second exits at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from bottega import stop_with_parent
from bottega.core import checkpoint
from small_run import Running, environment, read_logged_steps, run_bottega, train_arguments, write_text

ENDLESS = {"training.max_steps": 1_000_000, "checkpoint.every": None, "evaluation.every": None, "training.ema": 0.9}
# A step of a thousand short forward passes: two signals arrive within one step, and Python handles each at once.
SLOW = {"training.batch_size": 1024, "training.micro_batch_size": 1}


SENT = {
    "SIGTERM": [signal.SIGTERM],
    "SIGINT": [signal.SIGINT],
    "SIGUSR1": [signal.SIGUSR1],
    "SIGHUP": [signal.SIGHUP],
    "SIGTERM-then-SIGTERM": [signal.SIGTERM, signal.SIGTERM],
    "SIGTERM-then-SIGINT": [signal.SIGTERM, signal.SIGINT],
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> dict[str, tuple[int, str, Path]]:
    """Exit code, standard error and directory of one run for each kind of signal."""
    output = tmp_path_factory.mktemp("signals")
    long_text = write_text(output / "long.txt", words=9000)

    def signal_run(name: str) -> tuple[int, str, Path]:
        slow = len(SENT[name]) > 1
        text, changes = (long_text, {**ENDLESS, **SLOW}) if slow else (text_file, ENDLESS)
        run = Running(output / name, train_arguments(output, text, "--quiet", name=name, **changes))
        run.until(1)
        for number in SENT[name]:
            run.process.send_signal(number)
            time.sleep(0.1)
        return *run.end(), output / name

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(SENT, pool.map(signal_run, SENT), strict=True))


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 85), ("SIGUSR1", 85), ("SIGHUP", 85), ("SIGINT", 130)])
def test_first_signal_saves_and_exits(stopped: dict[str, tuple[int, str, Path]], name: str, code: int) -> None:
    returned, err, run = stopped[name]
    assert returned == code, err
    last = checkpoint.read_link(run / "checkpoints", "last")
    assert last is not None
    step = checkpoint.verify(last).step
    assert err == f"bottega: stopped by {name} at step {step}; the state is saved, run the same command to continue\n"
    assert read_logged_steps(run) == list(range(1, step + 1))


def test_same_command_resumes_after_a_signal(stopped: dict[str, tuple[int, str, Path]], text_file: Path) -> None:
    """Only `training.max_steps` is changed."""
    run = stopped["SIGTERM"][2]
    step = checkpoint.verify(run / "checkpoints" / "last").step
    more = {**ENDLESS, "training.max_steps": 1_000_001}
    again = Running(run, train_arguments(run.parent, text_file, "--quiet", name=run.name, **more))
    again.until(step + 2)
    again.process.send_signal(signal.SIGTERM)
    code, err = again.end()
    assert code == 85, err
    steps = read_logged_steps(run)
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= step + 2


@pytest.mark.parametrize(("name", "code"), [("SIGTERM-then-SIGTERM", 143), ("SIGTERM-then-SIGINT", 130)])
def test_second_signal_exits_at_once(stopped: dict[str, tuple[int, str, Path]], name: str, code: int) -> None:
    returned, err, run = stopped[name]
    assert returned == code, err
    assert "second signal" in err
    assert checkpoint.list_checkpoints(run / "checkpoints") == [], "nothing was saved"


TWICE = """
import os, signal, threading
from bottega.signals import StopSignals

with StopSignals() as signals:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(0.01)  # lets Python run the handler
    print("saved after", signals.received.name)
"""


@pytest.mark.parametrize("with_parent", [False, True])
def test_repeated_sigterm_never_ends_a_process_that_stops_with_its_parent(with_parent: bool) -> None:
    """The kernel announces the death of a parent once for each of its threads."""
    command = [sys.executable, "-c", TWICE]
    if with_parent:
        command = stop_with_parent.build_command(command)
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    if with_parent and sys.platform == "linux":
        assert (done.returncode, done.stdout) == (0, "saved after SIGTERM\n"), done.stderr
    else:
        assert done.returncode == 143
        assert "second signal" in done.stderr


AT_IMPORT = """
import os, sys

def hook(event, arguments):
    if event == "import" and arguments[0] == os.environ["SIGNAL_AT"] and not hook.is_done:
        hook.is_done = True
        first, *more = map(int, os.environ["SIGNALS"].split())
        try:
            os.kill(os.getpid(), first)
        finally:
            for number in more:
                os.kill(os.getpid(), number)

hook.is_done = False
sys.addaudithook(hook)
"""
"""Sends signals to its own process when the import of a module begins."""


@pytest.mark.parametrize(
    ("module", "number", "code"),
    [
        ("bottega.cli", signal.SIGTERM, 85),
        ("pydantic", signal.SIGUSR1, 85),
        ("torch", signal.SIGINT, 130),
        ("bottega.data.prepare.encode", signal.SIGHUP, 85),
        ("bottega.engines.torch.engine", signal.SIGTERM, 85),
    ],
)
def test_signal_before_the_training_loop(tmp_path: Path, text_file: Path, module: str, number: int, code: int) -> None:
    """During imports, data preparation and the construction of the model."""
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT)
    hooked = {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])}
    arguments = train_arguments(tmp_path, text_file, name="x")
    done = run_bottega(arguments, env={**hooked, "SIGNAL_AT": module, "SIGNALS": str(int(number))}, cold=True)
    assert done.returncode == code, done.stderr
    assert f"bottega: stopped by {signal.Signals(number).name}; run the same command again" in done.stderr
    assert "Traceback" not in done.stderr
    again = run_bottega([*arguments, "--quiet", "--json"])
    assert again.returncode == 0, again.stderr
    assert read_logged_steps(tmp_path / "x") == list(range(1, 9))


def test_two_signals_before_the_training_loop_exit_at_once(tmp_path: Path, text_file: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT)
    hooked = {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])}
    both = f"{int(signal.SIGUSR1)} {int(signal.SIGTERM)}"
    done = run_bottega(
        train_arguments(tmp_path, text_file, name="x"), env={**hooked, "SIGNAL_AT": "torch", "SIGNALS": both}, cold=True
    )
    assert done.returncode == 143, done.stderr
    assert "second signal" in done.stderr


def test_signal_during_a_long_c_call(tmp_path: Path) -> None:
    """A C call that would take an hour, during which Python runs no signal handler."""
    code = (
        "import hashlib, os, signal, threading\n"
        "from bottega import signals\n"
        "signals.HANDLER_TIMEOUT_SECONDS = 0.2\n"
        "with signals.CommandSignals():\n"
        "    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 85, done.stderr
    assert "stopped by SIGTERM" in done.stderr


def test_nohup_is_respected(tmp_path: Path, text_file: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = Running(tmp_path / "x", train_arguments(tmp_path, text_file, "--quiet", name="x", **ENDLESS), cold=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    run.until(2)
    run.process.send_signal(signal.SIGHUP)
    run.until(len(read_logged_steps(tmp_path / "x")) + 5)
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 85


def test_a_stopped_worker_does_not_stop_the_run(tmp_path: Path, text_file: Path) -> None:
    run = Running(
        tmp_path / "x", train_arguments(tmp_path, text_file, "--quiet", name="x", **ENDLESS, **{"data.workers": 1})
    )
    run.until(2)
    worker = psutil.Process(run.process.pid).children()[0]
    worker.suspend()
    run.until(len(read_logged_steps(tmp_path / "x")) + 20)
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 85
    assert f"loader worker {worker.pid} was stopped by a signal (SIGSTOP)" in (tmp_path / "x" / "log.txt").read_text()


def test_no_worker_outlives_the_run(stopped: dict[str, tuple[int, str, Path]], tmp_path: Path, text_file: Path) -> None:
    run = Running(
        tmp_path / "w", train_arguments(tmp_path, text_file, "--quiet", name="w", **ENDLESS, **{"data.workers": 2})
    )
    run.until(2)
    children = psutil.Process(run.process.pid).children(recursive=True)
    assert len(children) == 2
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    _, alive = psutil.wait_procs(children, timeout=100)
    assert alive == []


def test_run_in_use_is_refused_with_its_process(tmp_path: Path, text_file: Path) -> None:
    run = Running(tmp_path / "x", train_arguments(tmp_path, text_file, "--quiet", name="x", **ENDLESS))
    run.until(1)
    second = run_bottega(train_arguments(tmp_path, text_file, "--quiet", name="x", **ENDLESS))
    run.process.kill()
    assert second.returncode == 9
    assert f"in use by process {run.process.pid}" in second.stderr
    run.end()
