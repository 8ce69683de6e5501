"""Two processes of two devices each train, evaluate, sample, save and resume like one process of one device."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bottega.metrics_log import read_metrics
from small_run import SMALL, read_tensors, train, write_text

OPTIONS = {
    **SMALL,
    "engine": "jax",
    "training.batch_size": 8,
    "training.ema": 0.9,
    "training.scheduler.name": "constant",
    "evaluation.batch_size": 6,
    "checkpoint.every": 2,
    "samples.every": 2,
    "samples.max_new_tokens": 8,
}


def start_two_processes(words: list[str]) -> list[subprocess.Popen[str]]:
    """Start a command in two processes of two virtual devices."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "bottega", *words],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def run_two_processes(words: list[str]) -> None:
    """Run a command in two processes; both must succeed."""
    processes = start_two_processes(words)
    outputs = [process.communicate(timeout=280)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"shard": 4}, {"replicate": 2, "tensor": 2}, {}], ids=["shard", "tensor", "default"])
def test_two_processes_train_and_resume_like_one(tmp_path: Path, axes: dict[str, int]) -> None:
    text = write_text(tmp_path / "text.txt")
    alone = train(tmp_path / "alone", text, **{**OPTIONS, "name": "run", "training.max_steps": 4}).path
    words = ["train", "language/shakespeare", f"data.train.path={text}", f"output_dir={tmp_path}", "name=run"]
    words += [f"{key}={'null' if value is None else value}" for key, value in OPTIONS.items()]
    words += [f"distributed.{axis}={size}" for axis, size in axes.items()]
    for steps in (2, 4):
        words = [word for word in words if not word.startswith("training.max_steps=")]
        run_two_processes([*words, f"training.max_steps={steps}"])
    ours, theirs = read_tensors(tmp_path / "run"), read_tensors(alone)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)
    a, b = (read_metrics(run / "metrics.jsonl") for run in (alone, tmp_path / "run"))
    assert [row["loss"] for row in b if row["kind"] == "train"] == pytest.approx(
        [row["loss"] for row in a if row["kind"] == "train"], rel=1e-5
    )
    sample = Path("samples") / "step-00000004" / "00.txt"
    assert (tmp_path / "run" / sample).read_text() == (alone / sample).read_text()
    assert "resumed" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.slow
def test_a_process_whose_peer_is_killed_says_so_and_ends(tmp_path: Path) -> None:
    text, log = write_text(tmp_path / "text.txt"), tmp_path / "run" / "metrics.jsonl"
    words = ["train", "language/shakespeare", f"data.train.path={text}", f"output_dir={tmp_path}", "name=run"]
    words += [f"{key}={'null' if value is None else value}" for key, value in OPTIONS.items()]
    survivor, victim = start_two_processes(
        [*words, "training.max_steps=100000", "evaluation.every=null", "checkpoint.every=null", "samples.every=null"]
    )
    while not (log.is_file() and log.stat().st_size) and survivor.poll() is None:
        time.sleep(0.1)
    victim.kill()
    output = survivor.communicate(timeout=120)[0]
    victim.communicate()
    # If it does not find out by a collective, JAX aborts it when the other has been silent for half a minute.
    assert survivor.returncode in (8, -signal.SIGABRT), output
    assert "another process was lost" in output or "another task died" in output


def test_missing_variables_of_a_launcher_are_named() -> None:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "bottega", "train", "language", "engine=jax"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 2
    assert "these variables are not set: MASTER_ADDR, MASTER_PORT" in done.stderr
