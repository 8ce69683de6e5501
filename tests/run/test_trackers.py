"""Trackers of a whole run: a failure never changes it, and a resumed run has each step once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import small_run
from bottega.callbacks.tensorboard import TensorBoard
from bottega.core.callback import Progress
from bottega.core.errors import EnvironmentProblem
from bottega.metrics_log import read_metrics
from small_run import differing_tensors, read_tensors

TENSORBOARD = {"logging.tensorboard": True}


@pytest.mark.parametrize("event", ["start", "after_step", "after_eval", "after_save", "state_dict", "finish"])
def test_a_tracker_that_fails_does_not_change_the_run(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    expected = small_run.train(tmp_path, text_file, name="expected")
    original = TensorBoard.finish

    def fail(self: TensorBoard, *arguments: Any) -> None:
        original(self, Progress(), KeyboardInterrupt())  # closes the file
        raise ZeroDivisionError

    monkeypatch.setattr(TensorBoard, event, fail)
    run = small_run.train(tmp_path, text_file, name="failing", **TENSORBOARD)
    assert run.step == expected.step
    assert not differing_tensors(read_tensors(run.path), read_tensors(expected.path))
    log = (run.path / "log.txt").read_text()
    assert log.count("tensorboard logging failed: ZeroDivisionError; training continues without it") == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_run_has_the_hyperparameters_and_each_step_once(tmp_path: Path, text_file: Path) -> None:
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.plugins.hparams import metadata

    run = small_run.train(tmp_path, text_file, name="x", **TENSORBOARD)
    small_run.train(tmp_path, text_file, name="x", **TENSORBOARD)  # finished already
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    name = str(run.path.relative_to(tmp_path))
    for tag, kind in (("train/loss", "train"), ("validation/loss", "eval")):
        steps = [row["step"] for row in read_metrics(run.path / "metrics.jsonl") if row["kind"] == kind]
        assert [event.step for event in multiplexer.Tensors(name, tag)] == steps
    content = multiplexer.SummaryMetadata(name, "_hparams_/session_start_info").plugin_data.content
    hyperparameters = metadata.parse_session_start_info_plugin_data(content).hparams
    assert hyperparameters["task"].string_value == "language"
    assert hyperparameters["training.max_steps"].number_value == 8
    assert not any(key.startswith(("logging", "output_dir", "name")) for key in hyperparameters)


def test_a_missing_wandb_package_is_named_before_training(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: find_spec(name, *rest) if name != "wandb" else None
    )
    with pytest.raises(EnvironmentProblem, match=r"bottega\[wandb\]"):
        small_run.train(tmp_path, text_file, name="x", **{"logging.wandb.project": "p"})
    assert not (tmp_path / "x").exists()
