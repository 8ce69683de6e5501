"""kill -9, at any moment and again and again, and disks that are full: the finished run is the one nothing happened to."""

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
from small_run import bottega, different, environment, steps_logged, tensors, train, words
from warm_process import WarmCommand

EVERYTHING: dict[str, Any] = {
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
"""What Python announces of an operation before it is done, and what its last name holds."""
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
    """Run the command until it kills itself in that moment; False when it ended before it came."""
    hooks.mkdir(exist_ok=True)
    (hooks / "sitecustomize.py").write_text(KILLER)
    event, part = rng.choice(MOMENTS[moment])
    count = 1 if moment == "start" else rng.randint(1, 6)
    paths = os.pathsep.join([str(hooks), environment()["PYTHONPATH"]])
    # What is imported at the start is there already in a warm process.
    hooked = {"PYTHONPATH": paths, "KILL_AT": f"{event}|{part}|{count}"}
    done = bottega(arguments, env=hooked, cold=moment == "start")
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


def nothing_announced_is_lost(run: Path) -> None:
    log = (run / "log.txt").read_text() if (run / "log.txt").exists() else ""
    announced = [int(step) for step in re.findall(r" saved \S+/step-(\d+)$", log, flags=re.MULTILINE)]
    for path, _ in checkpoint.list_checkpoints(run / "checkpoints"):
        checkpoint.verify(path)  # nothing is half there
    if announced:
        good = checkpoint.find_newest_valid(run / "checkpoints", pytest.fail)
        assert good is not None
        assert good[1].step >= announced[-1]


def campaign(output: Path, text: Path, *, kills: int, steps: int) -> None:
    options = {**EVERYTHING, "name": "killed", "training.max_steps": steps}
    straight = train(output / "straight", text, **{**options, "data.workers": 0}).path
    run, rng, killed = output / "killed", random.Random(kills), 0
    arguments = words(output, text, "--quiet", **options)
    names = list(MOMENTS) if kills >= len(MOMENTS) else ["step", "save", "rotate"]
    for number in range(kills):
        killed += kill_at(names[number % len(names)], arguments, output / "hooks", rng)
        nothing_announced_is_lost(run)
    assert killed == kills, "the run ended before all kills; give it more steps"
    done = bottega(arguments)
    assert done.returncode == 0, done.stderr
    assert different(tensors(straight), tensors(run)) == []
    assert different(tensors(straight, "best"), tensors(run, "best")) == []
    for kind in ("train", "eval"):
        assert steps_logged(run, kind) == steps_logged(straight, kind)
    assert steps_logged(run) == list(range(1, steps + 1))
    assert not [name for name in os.listdir(run / "checkpoints") if name.startswith(".")], "leftovers are swept"


def test_three_kills_change_nothing(tmp_path: Path, text_file: Path) -> None:
    campaign(tmp_path, text_file, kills=3, steps=120)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_change_nothing(tmp_path: Path, text_file: Path) -> None:
    campaign(tmp_path, text_file, kills=20, steps=600)


LARGER = {"model.hidden_size": 64, "model.head_size": 32, "model.intermediate_size": 128, "checkpoint.every": 2}


def limit_files(size: int) -> str:
    return f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"


@pytest.mark.parametrize("tensorboard", [False, True], ids=["", "with TensorBoard"])
def test_a_file_size_limit_ends_the_run_with_code_5_and_the_older_checkpoint_stands(
    tmp_path: Path, text_file: Path, tensorboard: bool
) -> None:
    options = {**LARGER, "name": "full", "training.scheduler.name": "constant", "logging.tensorboard": tensorboard}
    run = train(tmp_path, text_file, **options, **{"training.max_steps": 4}).path
    before = tensors(run)
    size = max(path.stat().st_size for path in run.glob("checkpoints/step-*/*"))
    arguments = words(tmp_path, text_file, "--quiet", **options, **{"training.max_steps": 40})
    done = bottega(arguments, first=limit_files(size - 1000))
    assert done.returncode == 5, done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith(f"bottega: cannot write {run / 'checkpoints'}: the file would exceed the size limit")
    assert re.search(r"needs [\d,]+ bytes, [\d,]+ bytes free", line)
    assert "Traceback" not in done.stderr
    assert different(before, tensors(run)) == [], "the last good one is still the last"
    assert not list((run / "checkpoints").glob(".tmp-*"))
    assert "older checkpoints are kept" in (run / "log.txt").read_text(), "it tried again first"
    # With room again the same command goes on from there.
    assert bottega(arguments).returncode == 0
    assert steps_logged(run) == list(range(1, 41))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB, where the machine lets us have one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    try:
        with path.open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
    except OSError:
        pass


def test_a_full_disk_ends_the_run_with_code_5_and_the_older_checkpoint_stands(
    small_disk: Path, text_file: Path
) -> None:
    """Somebody else fills it while the run is under way."""
    rare = {"checkpoint.every": 50, "checkpoint.keep": 1, "evaluation.every": None}
    options = {**LARGER, **rare, "name": "full", "training.scheduler.name": "constant"}
    run = train(small_disk, text_file, **options, **{"training.max_steps": 2}).path
    before = tensors(run)
    arguments = words(small_disk, text_file, "--quiet", **options, **{"training.max_steps": 150})
    process = WarmCommand(arguments, env=environment())
    while process.poll() is None and steps_logged(run)[-1] < 4:
        time.sleep(0.01)
    fill(small_disk / "somebody else's")
    _, err = process.communicate(timeout=200)
    assert process.returncode == 5, err
    assert f"bottega: cannot write {run / 'checkpoints'}: the disk is full: needs 5" in err
    assert re.search(r"needs [\d,]+ bytes, [\d,]+ bytes free", err)
    assert "Traceback" not in err
    assert different(before, tensors(run)) == []
    refused = bottega(arguments)
    assert refused.returncode == 5, "and the next start finds out before its first step"
    (small_disk / "somebody else's").unlink()
    done = bottega(arguments)
    assert done.returncode == 0, done.stderr
    assert steps_logged(run) == list(range(1, 151))


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


def test_a_killed_worker_changes_nothing(tmp_path: Path, text_file: Path) -> None:
    """The loader's own process, not the run's."""
    options = {**EVERYTHING, "name": "w", "training.max_steps": 60, "checkpoint.every": 50}
    straight = train(tmp_path / "straight", text_file, **{**options, "data.workers": 0}).path
    (tmp_path / "sitecustomize.py").write_text(WORKER_KILLER)
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = bottega(words(tmp_path, text_file, "--quiet", **options), env={"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("killed a worker") == 2
    assert different(tensors(straight), tensors(tmp_path / "w")) == []
