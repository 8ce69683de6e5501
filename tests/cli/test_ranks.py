"""Several processes under torchrun: they stop together, and when one is lost the others do not wait for it."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from bottega.core import checkpoint
from small_run import Running, steps_logged, words

LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
ENDLESS = {"training.max_steps": 1_000_000, "checkpoint.every": 5, "evaluation.every": None, "name": "x"}


def start(output: Path, text: Path) -> tuple[Running, dict[int, psutil.Process]]:
    """The launcher, and its ranks."""
    run = Running(output / "x", words(output, text, "--quiet", **ENDLESS), launcher=LAUNCH)
    run.until(7)
    children = psutil.Process(run.process.pid).children()
    return run, {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path, text_file: Path, rank: int) -> None:
    run, ranks = start(tmp_path, text_file)
    ranks[rank].send_signal(signal.SIGTERM)
    _, err = run.end()
    last = checkpoint.follow(tmp_path / "x" / "checkpoints", "last")
    assert last is not None
    step = checkpoint.verify(last).step
    assert f"bottega: rank {rank}: stopped by SIGTERM at step {step}; saved" in err
    assert steps_logged(tmp_path / "x") == list(range(1, step + 1))
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in ranks.values())


def test_the_loss_of_a_rank_ends_the_others_soon_and_loses_nothing(tmp_path: Path, text_file: Path) -> None:
    run, ranks = start(tmp_path, text_file)
    ranks[1].kill()
    code, err = run.end()
    assert code != 0
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in ranks.values())
    good = checkpoint.newest_good(tmp_path / "x" / "checkpoints", pytest.fail)
    assert good is not None, err
    assert good[1].step >= 5
