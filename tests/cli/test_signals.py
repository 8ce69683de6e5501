"""Signals to the real command: the first one saves and leaves with a code a scheduler understands, the second ends it."""

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

from bottega.core import checkpoint
from small_run import Running, bottega, environment, steps_logged, words, write_text

ENDLESS = {"training.max_steps": 1_000_000, "checkpoint.every": None, "evaluation.every": None, "training.ema": 0.9}
# A step of a thousand short forwards: two signals fall into one step, and Python sees each of them at once.
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
    """What became of one run for each kind of signal: exit code, standard error, directory."""
    output = tmp_path_factory.mktemp("signals")
    long_text = write_text(output / "long.txt", words=9000)

    def live(name: str) -> tuple[int, str, Path]:
        slow = len(SENT[name]) > 1
        text, changes = (long_text, {**ENDLESS, **SLOW}) if slow else (text_file, ENDLESS)
        run = Running(output / name, words(output, text, "--quiet", name=name, **changes))
        run.until(1)
        for number in SENT[name]:
            run.process.send_signal(number)
            time.sleep(0.1)
        return *run.end(), output / name

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(SENT, pool.map(live, SENT), strict=True))


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 85), ("SIGUSR1", 85), ("SIGHUP", 85), ("SIGINT", 130)])
def test_the_first_signal_saves_and_leaves(stopped: dict[str, tuple[int, str, Path]], name: str, code: int) -> None:
    returned, err, run = stopped[name]
    assert returned == code, err
    last = checkpoint.read_link(run / "checkpoints", "last")
    assert last is not None
    step = checkpoint.verify(last).step
    assert err == f"bottega: stopped by {name} at step {step}; the state is saved, run the same command to continue\n"
    assert steps_logged(run) == list(range(1, step + 1))


def test_the_same_command_goes_on(stopped: dict[str, tuple[int, str, Path]], text_file: Path) -> None:
    """With a few more steps than it has; nothing but the end of the run may have changed."""
    run = stopped["SIGTERM"][2]
    step = checkpoint.verify(run / "checkpoints" / "last").step
    more = {**ENDLESS, "training.max_steps": 1_000_001}
    again = Running(run, words(run.parent, text_file, "--quiet", name=run.name, **more))
    again.until(step + 2)
    again.process.send_signal(signal.SIGTERM)
    code, err = again.end()
    assert code == 85, err
    steps = steps_logged(run)
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= step + 2


@pytest.mark.parametrize(("name", "code"), [("SIGTERM-then-SIGTERM", 143), ("SIGTERM-then-SIGINT", 130)])
def test_the_second_signal_ends_it_at_once(stopped: dict[str, tuple[int, str, Path]], name: str, code: int) -> None:
    returned, err, run = stopped[name]
    assert returned == code, err
    assert "second signal" in err
    assert checkpoint.list_checkpoints(run / "checkpoints") == [], "there was no time to save"


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
"""Sends signals to its own process where a module begins to be imported."""


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
def test_a_signal_before_the_loop(tmp_path: Path, text_file: Path, module: str, number: int, code: int) -> None:
    """While modules are imported, data is prepared and the model is built."""
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT)
    hooked = {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])}
    arguments = words(tmp_path, text_file, name="x")
    done = bottega(arguments, env={**hooked, "SIGNAL_AT": module, "SIGNALS": str(int(number))}, cold=True)
    assert done.returncode == code, done.stderr
    assert f"bottega: stopped by {signal.Signals(number).name}; run the same command again" in done.stderr
    assert "Traceback" not in done.stderr
    again = bottega([*arguments, "--quiet", "--json"])
    assert again.returncode == 0, again.stderr
    assert steps_logged(tmp_path / "x") == list(range(1, 9))


def test_two_signals_before_the_loop_end_it_at_once(tmp_path: Path, text_file: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT)
    hooked = {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])}
    both = f"{int(signal.SIGUSR1)} {int(signal.SIGTERM)}"
    done = bottega(
        words(tmp_path, text_file, name="x"), env={**hooked, "SIGNAL_AT": "torch", "SIGNALS": both}, cold=True
    )
    assert done.returncode == 143, done.stderr
    assert "second signal" in done.stderr


def test_a_library_that_keeps_the_main_thread(tmp_path: Path) -> None:
    """Python runs no handler while it computes, and it would for an hour."""
    code = (
        "import hashlib, os, signal, threading\n"
        "from bottega import signals\n"
        "signals.HANDLER_TIMEOUT = 0.2\n"
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
        run = Running(tmp_path / "x", words(tmp_path, text_file, "--quiet", name="x", **ENDLESS), cold=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    run.until(2)
    run.process.send_signal(signal.SIGHUP)
    run.until(len(steps_logged(tmp_path / "x")) + 5)
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 85


def test_a_stopped_worker_does_not_stop_the_run(tmp_path: Path, text_file: Path) -> None:
    run = Running(tmp_path / "x", words(tmp_path, text_file, "--quiet", name="x", **ENDLESS, **{"data.workers": 1}))
    run.until(2)
    worker = psutil.Process(run.process.pid).children()[0]
    worker.suspend()
    run.until(len(steps_logged(tmp_path / "x")) + 20)
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 85
    assert f"loader worker {worker.pid} was stopped by a signal (SIGSTOP)" in (tmp_path / "x" / "log.txt").read_text()


def test_no_worker_outlives_the_run(stopped: dict[str, tuple[int, str, Path]], tmp_path: Path, text_file: Path) -> None:
    run = Running(tmp_path / "w", words(tmp_path, text_file, "--quiet", name="w", **ENDLESS, **{"data.workers": 2}))
    run.until(2)
    children = psutil.Process(run.process.pid).children(recursive=True)
    assert len(children) == 2
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    _, alive = psutil.wait_procs(children, timeout=100)
    assert alive == []


def test_a_run_in_use_is_named_by_the_real_command(tmp_path: Path, text_file: Path) -> None:
    run = Running(tmp_path / "x", words(tmp_path, text_file, "--quiet", name="x", **ENDLESS))
    run.until(1)
    second = bottega(words(tmp_path, text_file, "--quiet", name="x", **ENDLESS))
    run.process.kill()
    assert second.returncode == 9
    assert f"in use by process {run.process.pid}" in second.stderr
    run.end()
