"""Several ranks under torchrun: they stop together, and the loss of one ends the others."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bottega.core import checkpoint
from small_run import Running, environment, read_logged_steps, run_bottega, train_arguments

SHORT_LIMITS = str(Path(__file__).parents[1] / "paused_ranks.py")
"""The command with a heartbeat timeout of one second."""
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
ENDLESS = {"training.max_steps": 1_000_000, "checkpoint.every": 5, "evaluation.every": None, "name": "x"}


def start_ranks(output: Path, text: Path, *script: str) -> tuple[Running, dict[int, psutil.Process]]:
    """Start a run under torchrun; return the launcher and its ranks."""
    run = Running(output / "x", train_arguments(output, text, "--quiet", **ENDLESS), launcher=(*LAUNCH, *script))
    run.until(7)
    while not (output / "x" / "checkpoints" / "last").exists():  # of step 5, written in the background
        run.until(len(read_logged_steps(output / "x")) + 1)
    children = psutil.Process(run.process.pid).children()
    return run, {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path, text_file: Path, rank: int) -> None:
    run, ranks = start_ranks(tmp_path, text_file)
    ranks[rank].send_signal(signal.SIGTERM)
    _, err = run.end()
    last = checkpoint.read_link(tmp_path / "x" / "checkpoints", "last")
    assert last is not None
    step = checkpoint.verify(last).step
    assert f"bottega: rank {rank}: stopped by SIGTERM at step {step}; the state is saved" in err
    assert read_logged_steps(tmp_path / "x") == list(range(1, step + 1))
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in ranks.values())


def list_alive(ranks: dict[int, psutil.Process]) -> list[int]:
    return [rank for rank, p in ranks.items() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_rank_ends_the_others_and_keeps_checkpoints(tmp_path: Path, text_file: Path, rank: int) -> None:
    run, ranks = start_ranks(tmp_path, text_file)
    ranks[rank].kill()
    code, err = run.end()
    assert code != 0
    assert list_alive(ranks) == []
    name = f"rank {rank} on {socket.gethostname()} (process {ranks[rank].pid})"
    assert re.search(
        rf"bottega: rank {1 - rank}: {re.escape(name)} (was killed by SIGKILL|has ended); run the same", err
    ), err
    assert f"exitcode  : 8 (pid: {ranks[1 - rank].pid})" in err
    newest = checkpoint.find_newest_valid(tmp_path / "x" / "checkpoints", pytest.fail)
    assert newest is not None, err
    assert newest[1].step >= 5


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_stopped_rank_ends_the_job_by_name(tmp_path: Path, text_file: Path, rank: int) -> None:
    """SIGSTOP closes no connection: a collective would wait for it forever."""
    run, ranks = start_ranks(tmp_path, text_file, SHORT_LIMITS)
    ranks[rank].suspend()
    code, err = run.end()
    assert code != 0
    assert list_alive(ranks) == [], "including the stopped rank"
    name = f"rank {rank} on {socket.gethostname()} (process {ranks[rank].pid})"
    assert f"bottega: rank {1 - rank}: {name} was stopped by SIGSTOP" in err
    assert f"exitcode  : 8 (pid: {ranks[1 - rank].pid})" in err
    if rank:
        assert f"ERROR {name} was stopped by SIGSTOP" in (tmp_path / "x" / "log.txt").read_text()


def test_missing_rank_times_out(tmp_path: Path, text_file: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    short = "from bottega.engines.torch import heartbeat; heartbeat.LOCAL_JOIN_TIMEOUT = 2.0"
    done = run_bottega(train_arguments(tmp_path, text_file, "--quiet", name="x"), env=alone, setup_code=short)
    assert done.returncode == 8
    assert "bottega: rank 0: rank 1 did not join within 2 s" in done.stderr


@pytest.mark.slow
def test_ranks_end_with_their_launcher(tmp_path: Path, text_file: Path) -> None:
    run, ranks = start_ranks(tmp_path, text_file)
    run.process.kill()
    psutil.wait_procs(ranks.values(), timeout=30)
    assert list_alive(ranks) == []
    assert f"the launcher (process {run.process.pid}) has ended" in run.end()[1]
    again = run_bottega(train_arguments(tmp_path, text_file, "--quiet", **{**ENDLESS, "training.max_steps": 8}))
    assert again.returncode != 9, "the lock of the run is released"


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_saves(tmp_path: Path, text_file: Path) -> None:
    """SIGINT reaches the ranks directly and again through the launcher; both count as one request."""
    run, ranks = start_ranks(tmp_path, text_file)
    for process in (*ranks.values(), psutil.Process(run.process.pid)):
        process.send_signal(signal.SIGINT)
    _, err = run.end()
    last = checkpoint.read_link(tmp_path / "x" / "checkpoints", "last")
    assert last is not None
    assert f"stopped by SIGINT at step {checkpoint.verify(last).step}; the state is saved" in err
    assert "second signal" not in err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_paused_rank_is_not_declared_lost(tmp_path: Path, text_file: Path) -> None:
    """Every pause is three times the heartbeat timeout."""
    pauses = 50
    changes = {"training.max_steps": pauses + 2, "evaluation.every": None, "checkpoint.every": None, "name": "x"}
    done = subprocess.run(
        [sys.executable, *LAUNCH, SHORT_LIMITS, *train_arguments(tmp_path, text_file, "--quiet", **changes)],
        env=environment(PAUSES=str(pauses)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert read_logged_steps(tmp_path / "x") == list(range(1, pauses + 3))
