"""`bottega verify-resume`: train a recipe, kill and resume it, and compare the runs bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bottega.core import checkpoint
from bottega.core.errors import BottegaError, CheckpointError
from bottega.core.rundir import RunDirectory, read_metrics
from bottega.tasks import plugins
from bottega.terminal import print_notice

SPEED_METRICS = ("samples_per_second", "units_per_second", "data_wait", "step_seconds")
MACHINE_METRICS = ("cpu_percent", "ram_gib", "disk_free_gib", "gpu_memory_gib", "gpu_percent")
TIMING_METRICS = (*SPEED_METRICS, *MACHINE_METRICS)
"""What may differ between two equal runs: how fast they were."""


def verify_resume(words: list[str], *, steps: int, kills: int, verbose: bool) -> dict[str, Any]:
    """Three runs of the same recipe: one whole, one killed `kills` times by SIGKILL, and one resumed after its end."""

    def say(text: str) -> None:
        if verbose:
            print_notice(f"bottega: {text}")

    with tempfile.TemporaryDirectory(prefix="bottega-verify-") as folder:
        every = max(1, steps // 6)
        common = [
            *words,
            f"training.max_steps={steps}",
            f"checkpoint.every={every}",
            f"evaluation.every={every}",
            "evaluation.max_batches=2",
            "logging.every=1",
            "logging.tensorboard=false",
            f"output_dir={folder}",
        ]
        say(f"a run of {steps} steps without interruption")
        seconds = _whole([*common, "name=whole"])
        say(f"the same, killed with SIGKILL {kills} times")
        survived = _killed([*common, "name=killed"], Path(folder) / "killed", kills=kills, steps=steps, say=say)
        say("the same once more, after its end")
        _whole([*common, "name=killed"])
        difference = find_difference(Path(folder) / "whole", Path(folder) / "killed")
    if difference is not None:
        raise CheckpointError(f"the resumed run differs: {difference}")
    say(
        f"equal bit for bit: weights, optimizer, data order and metrics, after {survived} kills ({seconds:.0f} s a run)"
    )
    return {"equal": True, "kills": survived, "steps": steps}


def _command(words: list[str]) -> list[str]:
    return plugins.bottega_command(["train", *words, "--quiet"])


def _whole(words: list[str]) -> float:
    began = time.monotonic()
    done = subprocess.run(_command(words), capture_output=True, text=True)
    if done.returncode:
        error = BottegaError((done.stderr.strip().splitlines() or ["the run failed"])[-1].removeprefix("bottega: "))
        error.code = done.returncode
        raise error
    return time.monotonic() - began


def _killed(words: list[str], run: Path, *, kills: int, steps: int, say: Callable[[str], None]) -> int:
    """Kill the run at random steps; a kill only counts once training has begun, else it would prove nothing."""
    chance = random.Random(0)
    done = 0
    while done < kills:
        process = subprocess.Popen(_command(words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        target = _step(run) + chance.randint(1, max(1, steps // (kills + 1)))
        while process.poll() is None and _step(run) < target:
            time.sleep(0.01)
        time.sleep(chance.random() * 0.05)
        if process.poll() is not None:
            break  # it finished first
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        done += 1
        say(f"killed after step {_step(run)}")
    _whole(words)
    return done


def _step(run: Path) -> int:
    rows = read_metrics(RunDirectory(run).metrics)
    return int(rows[-1]["step"]) if rows else 0


def find_difference(one: Path, other: Path) -> str | None:
    """The first difference between two runs, or None."""
    a, b = (checkpoint.find_newest(RunDirectory(path).checkpoints) for path in (one, other))
    if a is None or b is None:
        return "one of them has no checkpoint"
    first, second = checkpoint.verify(a), checkpoint.verify(b)
    for name in sorted(first.files.keys() | second.files.keys()):
        if name.endswith(".safetensors") and first.files.get(name) != second.files.get(name):
            return _first_tensor(a / name, b / name)
    rows, others = (_comparable(RunDirectory(path).metrics) for path in (one, other))
    if len(rows) != len(others):
        return f"metrics.jsonl has {len(rows)} lines in one run and {len(others)} in the other"
    for row, theirs in zip(rows, others, strict=True):
        if row != theirs:
            return f"metrics.jsonl: {json.dumps(row)} against {json.dumps(theirs)}"
    return None


def _first_tensor(a: Path, b: Path) -> str:
    from safetensors.numpy import load_file

    if not (a.is_file() and b.is_file()):
        return f"{a.name} is in one checkpoint only"
    ours, theirs = load_file(a), load_file(b)
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            return f"{a.name}: {name} is in one of them only"
        if ours[name].tobytes() != theirs[name].tobytes():
            return f"{a.name}: {name} differs by up to {abs(ours[name] - theirs[name]).max()}"
    return f"{a.name} differs in its layout"


def _comparable(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMING_METRICS} for row in read_metrics(path)]
