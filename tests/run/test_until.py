"""`train --until`: a paused run is evaluated and saved at the step, and ends as one that was not paused."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.core.errors import UsageError
from bottega.metrics_log import read_metrics
from bottega.run.train import train_command
from small_run import differing_tensors, read_tensors
from small_texts import settings

OPTIONS = {"fresh": False, "resume_from": None, "allow_data_change": False, "quiet": True}


def train(folder: Path, name: str, *, until: int | None = None) -> int:
    values = {**settings(folder / "data", "cnn"), "output_dir": str(folder), "name": name, "evaluation.every": 4}
    words = [f"{key}={'null' if value is None else value}" for key, value in values.items()]
    return int(train_command(["classify", *words], until=until, **OPTIONS)["step"])  # type: ignore[arg-type]


def test_a_paused_run_ends_bit_for_bit_as_an_unpaused_one(tmp_path: Path) -> None:
    assert train(tmp_path, "paused", until=3) == 3
    rows = read_metrics(tmp_path / "paused" / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [3]
    assert train(tmp_path, "paused", until=3) == 3  # already there
    assert train(tmp_path, "paused") == 8
    assert train(tmp_path, "whole") == 8
    assert not differing_tensors(read_tensors(tmp_path / "paused"), read_tensors(tmp_path / "whole"))
    assert train(tmp_path, "short", until=99) == 8


def test_a_step_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--until 0: expected a step"):
        train(tmp_path, "bad", until=0)
