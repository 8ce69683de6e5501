"""SIGKILL at any moment, repeatedly, and full disks: the finished run is bitwise equal to an undisturbed one."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bottega.core import checkpoint
from small_run import (
    differing_tensors,
    environment,
    read_logged_steps,
    read_tensors,
    run_bottega,
    train,
    train_arguments,
)
from warm_process import WarmCommand

ALL_OPTIONS: dict[str, Any] = {
    "model.dropout": 0.1,
    "training.ema": 0.9,
    "training.micro_batch_size": 2,
    "data.workers": 1,
    "checkpoint.every": 2,
    "checkpoint.keep": 2,
    "evaluation.every": 5,
}
MOMENTS: dict[str, list[tuple[str, str]]] = {
    "start": [("import", "torch"), ("import", "bottega.run.compose"), ("import", "bottega.engines.torch.engine")],
    "step": [("open", "metrics.jsonl")],
    "save": [("os.mkdir", ".tmp-"), ("open", ".tmp-"), ("os.rename", "/step-")],
    "rotate": [("os.rename", ".trash-"), ("shutil.rmtree", ".trash-"), ("os.remove", "safetensors")],
}
"""Moment -> operations to kill the process before: (audit event, substring of its path)."""
KILLER = """
import os, signal, sys

event, part, count = os.environ["KILL_AT"].split("|")
left = [int(count)]

def hook(name, arguments):
    if name == event and part in str(arguments[1 if name == "os.rename" else 0]):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
"""


def kill_at(moment: str, arguments: list[str], hooks: Path, rng: random.Random) -> bool:
    """Run the command until it kills itself at `moment`; return False if it ended first."""
    hooks.mkdir(exist_ok=True)
    (hooks / "sitecustomize.py").write_text(KILLER)
    event, part = rng.choice(MOMENTS[moment])
    count = 1 if moment == "start" else rng.randint(1, 6)
    paths = os.pathsep.join([str(hooks), environment()["PYTHONPATH"]])
    # A warm process has imported everything already.
    variables = {"PYTHONPATH": paths, "KILL_AT": f"{event}|{part}|{count}"}
    done = run_bottega(arguments, env=variables, cold=moment == "start")
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def check_saved_checkpoints(run: Path) -> None:
    log = (run / "log.txt").read_text() if (run / "log.txt").exists() else ""
    announced = [int(step) for step in re.findall(r" saved \S+/step-(\d+)$", log, flags=re.MULTILINE)]
    for path, _ in checkpoint.list_checkpoints(run / "checkpoints"):
        checkpoint.verify(path)  # no partial checkpoint
    if announced:
        newest = checkpoint.find_newest_valid(run / "checkpoints", pytest.fail)
        assert newest is not None
        assert newest[1].step >= announced[-1]


def check_kills(output: Path, text: Path, *, kills: int, steps: int) -> None:
    options = {**ALL_OPTIONS, "name": "killed", "training.max_steps": steps}
    expected = train(output / "straight", text, **{**options, "data.workers": 0}).path
    run, rng, killed = output / "killed", random.Random(kills), 0
    arguments = train_arguments(output, text, "--quiet", **options)
    names = list(MOMENTS) if kills >= len(MOMENTS) else ["step", "save", "rotate"]
    for number in range(kills):
        killed += kill_at(names[number % len(names)], arguments, output / "hooks", rng)
        check_saved_checkpoints(run)
    assert killed == kills, "the run ended before all kills; give it more steps"
    done = run_bottega(arguments)
    assert done.returncode == 0, done.stderr
    assert differing_tensors(read_tensors(expected), read_tensors(run)) == []
    assert differing_tensors(read_tensors(expected, "best"), read_tensors(run, "best")) == []
    for kind in ("train", "eval"):
        assert read_logged_steps(run, kind) == read_logged_steps(expected, kind)
    assert read_logged_steps(run) == list(range(1, steps + 1))
    assert not [name for name in os.listdir(run / "checkpoints") if name.startswith(".")], "temporary files are removed"


def test_run_is_bitwise_equal_after_three_kills(tmp_path: Path, text_file: Path) -> None:
    check_kills(tmp_path, text_file, kills=3, steps=120)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_is_bitwise_equal_after_twenty_kills(tmp_path: Path, text_file: Path) -> None:
    check_kills(tmp_path, text_file, kills=20, steps=600)


LARGER = {"model.hidden_size": 64, "model.head_size": 32, "model.intermediate_size": 128, "checkpoint.every": 2}


def limit_files(size: int) -> str:
    return f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"


@pytest.mark.parametrize("tensorboard", [False, True], ids=["", "with TensorBoard"])
def test_file_size_limit_exits_with_5_and_keeps_the_older_checkpoint(
    tmp_path: Path, text_file: Path, tensorboard: bool
) -> None:
    options = {**LARGER, "name": "full", "training.scheduler.name": "constant", "logging.tensorboard": tensorboard}
    run = train(tmp_path, text_file, **options, **{"training.max_steps": 4}).path
    before = read_tensors(run)
    size = max(path.stat().st_size for path in run.glob("checkpoints/step-*/*"))
    arguments = train_arguments(tmp_path, text_file, "--quiet", **options, **{"training.max_steps": 40})
    done = run_bottega(arguments, setup_code=limit_files(size - 1000))
    assert done.returncode == 5, done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith(f"bottega: cannot write {run / 'checkpoints'}: the file would exceed the size limit")
    assert re.search(r"needs [\d,]+ bytes, [\d,]+ bytes free", line)
    assert "Traceback" not in done.stderr
    assert differing_tensors(before, read_tensors(run)) == [], "the last valid checkpoint is still the last"
    assert not list((run / "checkpoints").glob(".tmp-*"))
    assert "older checkpoints are kept" in (run / "log.txt").read_text(), "it retried first"
    # With free space, the same command resumes.
    assert run_bottega(arguments).returncode == 0
    assert read_logged_steps(run) == list(range(1, 41))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MB; skipped where it cannot be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_disk(path: Path) -> None:
    try:
        with path.open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
    except OSError:
        pass


def test_full_disk_exits_with_5_and_keeps_the_older_checkpoint(small_disk: Path, text_file: Path) -> None:
    """Another process fills the disk during the run."""
    rare = {"checkpoint.every": 50, "checkpoint.keep": 1, "evaluation.every": None}
    options = {**LARGER, **rare, "name": "full", "training.scheduler.name": "constant"}
    run = train(small_disk, text_file, **options, **{"training.max_steps": 2}).path
    before = read_tensors(run)
    arguments = train_arguments(small_disk, text_file, "--quiet", **options, **{"training.max_steps": 150})
    process = WarmCommand(arguments, env=environment())
    while process.poll() is None and read_logged_steps(run)[-1] < 4:
        time.sleep(0.01)
    fill_disk(small_disk / "somebody else's")
    _, err = process.communicate(timeout=200)
    assert process.returncode == 5, err
    assert f"bottega: cannot write {run / 'checkpoints'}: the disk is full: needs 5" in err
    assert re.search(r"needs [\d,]+ bytes, [\d,]+ bytes free", err)
    assert "Traceback" not in err
    assert differing_tensors(before, read_tensors(run)) == []
    refused = run_bottega(arguments)
    assert refused.returncode == 5, "the next start fails before its first step"
    (small_disk / "somebody else's").unlink()
    done = run_bottega(arguments)
    assert done.returncode == 0, done.stderr
    assert read_logged_steps(run) == list(range(1, 151))


WORKER_KILLER = """
import os, sys

written = [0]

def hook(name, arguments):
    if name == "open" and str(arguments[0]).endswith("metrics.jsonl"):
        written[0] += 1
        if written[0] in (20, 40):
            import psutil
            for child in psutil.Process().children():
                child.kill()
                os.write(2, b"killed a worker\\n")

if os.environ.get("BOTTEGA_WORKER") != "1":
    sys.addaudithook(hook)
"""


def test_run_is_bitwise_equal_after_a_killed_worker(tmp_path: Path, text_file: Path) -> None:
    """A worker of the data loader, not the training process."""
    options = {**ALL_OPTIONS, "name": "w", "training.max_steps": 60, "checkpoint.every": 50}
    expected = train(tmp_path / "straight", text_file, **{**options, "data.workers": 0}).path
    (tmp_path / "sitecustomize.py").write_text(WORKER_KILLER)
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = run_bottega(train_arguments(tmp_path, text_file, "--quiet", **options), env={"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("killed a worker") == 2
    assert differing_tensors(read_tensors(expected), read_tensors(tmp_path / "w")) == []
