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

from bottega.callbacks.resources import MACHINE_METRICS
from bottega.core import checkpoint
from bottega.core.errors import BottegaError, CheckpointError
from bottega.core.rundir import RunDirectory
from bottega.metrics_log import read_metrics
from bottega.tasks import plugins
from bottega.terminal import print_notice

SPEED_METRICS = ("samples_per_second", "units_per_second", "data_wait", "step_seconds", "matmul_share")
TIMING_METRICS = (*SPEED_METRICS, *MACHINE_METRICS)
"""Metrics of speed and load, which may differ between two equal runs."""


def verify_resume(words: list[str], *, steps: int, kills: int, verbose: bool) -> dict[str, Any]:
    """Train a recipe uninterrupted, and again with `kills` SIGKILLs and a resume after its end; compare bit for bit.

    Raises `CheckpointError` if the runs differ.
    """

    def log(text: str) -> None:
        if verbose:
            print_notice(f"bottega: {text}")

    with tempfile.TemporaryDirectory(prefix="bottega-verify-") as folder:
        interval = max(1, steps // 6)
        common_words = [
            *words,
            f"training.max_steps={steps}",
            f"checkpoint.every={interval}",
            f"evaluation.every={interval}",
            "evaluation.max_batches=2",
            "logging.every=1",
            "logging.tensorboard=false",
            f"output_dir={folder}",
        ]
        log(f"training {steps} steps without interruption, for comparison")
        seconds = _train_to_end([*common_words, "name=whole"])
        log(f"training the same steps, killed {kills} x with SIGKILL")
        num_kills = _train_with_kills(
            [*common_words, "name=killed"], Path(folder) / "killed", kills=kills, steps=steps, log=log
        )
        log("the same command again, after the end of the run")
        _train_to_end([*common_words, "name=killed"])
        difference = find_difference(Path(folder) / "whole", Path(folder) / "killed")
    if difference is not None:
        raise CheckpointError(f"the resumed run differs: {difference}")
    log(
        f"equal bit for bit: weights, optimizer, data order and metrics, after {num_kills} x SIGKILL ({seconds:.0f} s "
        "per run)"
    )
    return {"equal": True, "kills": num_kills, "steps": steps}


def _build_train_command(words: list[str]) -> list[str]:
    return plugins.build_bottega_command(["train", *words, "--quiet"])


def _train_to_end(words: list[str]) -> float:
    """Run or resume training until it ends, and return the seconds that took."""
    started = time.monotonic()
    process = subprocess.run(_build_train_command(words), capture_output=True, text=True)
    if process.returncode:
        error = BottegaError((process.stderr.strip().splitlines() or ["the run failed"])[-1].removeprefix("bottega: "))
        error.code = process.returncode
        raise error
    return time.monotonic() - started


def _train_with_kills(words: list[str], run: Path, *, kills: int, steps: int, log: Callable[[str], None]) -> int:
    """Kill and resume the run at random steps, then train it to its end; return the number of kills.

    It is less than `kills` if the run ends before.
    """
    rng = random.Random(0)
    num_kills = 0
    while num_kills < kills:
        process = subprocess.Popen(
            _build_train_command(words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        target = _read_last_step(run) + rng.randint(1, max(1, steps // (kills + 1)))
        while process.poll() is None and _read_last_step(run) < target:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.05)
        if process.poll() is not None:
            break  # finished before the kill
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        num_kills += 1
        log(f"killed after step {_read_last_step(run)}")
    _train_to_end(words)
    return num_kills


def _read_last_step(run: Path) -> int:
    rows = read_metrics(RunDirectory(run).metrics)
    return int(rows[-1]["step"]) if rows else 0


def find_difference(first_run: Path, second_run: Path) -> str | None:
    """Return the first difference between two runs in tensors or metrics, or None."""
    first_checkpoint, second_checkpoint = (
        checkpoint.find_newest(RunDirectory(path).checkpoints) for path in (first_run, second_run)
    )
    if first_checkpoint is None or second_checkpoint is None:
        return "one of the two runs has no checkpoint"
    first_manifest, second_manifest = checkpoint.verify(first_checkpoint), checkpoint.verify(second_checkpoint)
    for name in sorted(first_manifest.files.keys() | second_manifest.files.keys()):
        if name.endswith(".safetensors") and first_manifest.files.get(name) != second_manifest.files.get(name):
            return _find_tensor_difference(first_checkpoint / name, second_checkpoint / name)
    rows, other_rows = (_read_comparable_metrics(RunDirectory(path).metrics) for path in (first_run, second_run))
    if len(rows) != len(other_rows):
        return f"metrics.jsonl has {len(rows)} lines in one run and {len(other_rows)} in the other"
    for row, other_row in zip(rows, other_rows, strict=True):
        if row != other_row:
            return f"metrics.jsonl: {json.dumps(row)} against {json.dumps(other_row)}"
    return None


def _find_tensor_difference(first_file: Path, second_file: Path) -> str:
    from safetensors.numpy import load_file

    if not (first_file.is_file() and second_file.is_file()):
        return f"{first_file.name} is in one checkpoint only"
    first_tensors, second_tensors = load_file(first_file), load_file(second_file)
    for name in sorted(first_tensors.keys() | second_tensors.keys()):
        if name not in first_tensors or name not in second_tensors:
            return f"{first_file.name}: {name} is in one checkpoint only"
        if first_tensors[name].tobytes() != second_tensors[name].tobytes():
            return f"{first_file.name}: {name} differs by up to {abs(first_tensors[name] - second_tensors[name]).max()}"
    return f"{first_file.name} differs in its layout"


def _read_comparable_metrics(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMING_METRICS} for row in read_metrics(path)]
