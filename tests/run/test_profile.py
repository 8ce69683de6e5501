"""`profile` and the memory monitor in a run: files, messages, interrupted runs, wrong values."""

from __future__ import annotations

import errno
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from bottega import cli
from bottega.config.recipe import RESULT_NEUTRAL_KEYS
from bottega.core.errors import OutOfMemory, UsageError
from bottega.engines.torch.engine import TorchEngine
from bottega.engines.torch.profiling import NUM_OPERATIONS
from bottega.run.train import train_command
from bottega.tasks.recipes import load_recipe, parse_overrides
from small_run import differing_tensors, read_tensors, train, train_arguments, write_text


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def run_command(arguments: list[str], **options: Any) -> Any:
    defaults = {"fresh": False, "resume_from": None, "allow_data_change": False, "quiet": False}
    return train_command(arguments[1:], **{**defaults, **options})


def list_steps(run: Path) -> list[str]:
    trace = json.loads(gzip.decompress((run / "profile" / "trace.json.gz").read_bytes()))
    return [event["name"] for event in trace["traceEvents"] if event["name"].startswith("step ") and event["ph"] == "X"]


def test_a_profiled_run_has_a_trace_a_table_and_the_same_weights(tmp_path: Path, text: Path, capfd: Any) -> None:
    run_command(train_arguments(tmp_path, text, name="profiled", **{"profile.steps": "[3,5]"}))
    output, profiled = capfd.readouterr().err, tmp_path / "profiled"
    assert list_steps(profiled) == ["step 3", "step 4", "step 5"]
    report = json.loads((profiled / "profile" / "operations.json").read_text())
    assert report["steps"] == [3, 5]
    assert report["device"] == "cpu"
    assert len(report["operations"]) == NUM_OPERATIONS
    for operation in report["operations"]:
        assert operation.keys() == {"name", "calls", "self_ms", "share", "device"}
        assert operation["name"][:50] in output
    assert f"trace: {profiled}/profile/trace.json.gz; open it at https://ui.perfetto.dev" in output
    assert "USDT" not in output  # the tracer's own messages
    plain = train(tmp_path, text, name="plain")
    assert not differing_tensors(read_tensors(profiled), read_tensors(plain.path))
    assert not (plain.path / "profile").exists()


def test_a_run_paused_within_the_steps_writes_what_it_has(tmp_path: Path, text: Path, capfd: Any) -> None:
    arguments = train_arguments(tmp_path, text, name="paused", **{"profile.steps": "3-6"})
    run_command(arguments, until=4)
    assert list_steps(tmp_path / "paused") == ["step 3", "step 4"]
    run_command(arguments)
    assert list_steps(tmp_path / "paused") == ["step 5", "step 6"]
    capfd.readouterr()
    run_command(arguments)  # the run has ended
    assert "resumed at step 8, after the steps 3 to 6, so nothing is profiled" in capfd.readouterr().err
    assert list_steps(tmp_path / "paused") == ["step 5", "step 6"]


def test_a_run_that_pauses_before_the_steps_says_so(tmp_path: Path, text: Path, capfd: Any) -> None:
    run_command(train_arguments(tmp_path, text, name="early", **{"profile.steps": "6-7"}), until=2)
    assert "profile.steps: training ended at step 2, so nothing was profiled" in capfd.readouterr().err
    assert not (tmp_path / "early" / "profile").exists()


def test_a_profile_that_cannot_be_written_does_not_end_training(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gzip, "open", fail)
    result = run_command(train_arguments(tmp_path, text, name="full-disk", **{"profile.steps": "3-4"}))
    assert result["step"] == 8
    folder = tmp_path / "full-disk" / "profile"
    assert f"warning: {folder}: the profile cannot be written (No space left on device)" in capfd.readouterr().err
    assert not folder.exists()
    assert not list(folder.parent.glob(".*profile*"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[5,3]", "expected steps from 1 on, the first before the last"),
        ("[0,3]", "expected steps from 1 on"),
        ("[-2,3]", "expected steps from 1 on"),
        ("[3]", "expected the first and the last step, such as"),
        ("7", "expected the first and the last step, such as"),
        ("[1.5,2]", "expected the first and the last step, such as"),
        ("[true,2]", "expected the first and the last step, such as"),
        ("often", "expected the first and the last step, such as"),
        ("[5,9]", "is past the end of the run, which has 8 steps; lower it"),
    ],
)
def test_wrong_steps_are_answered_in_one_line(value: str, message: str, tmp_path: Path, text: Path, capfd: Any) -> None:
    code = cli.main(train_arguments(tmp_path, text, name="wrong", **{"profile.steps": value}))
    lines = capfd.readouterr().err.strip().splitlines()
    assert code == UsageError.code
    assert len(lines) == 1
    assert "profile.steps" in lines[0]
    assert message in lines[0]


@pytest.mark.parametrize("words", [["profile.steps=[10,20]"], ["--profile", "10-20"], ["profile=10-20"]])
def test_steps_can_be_given_as_a_list_or_a_range(words: list[str]) -> None:
    recipe = load_recipe(*parse_overrides(["routing", *words])).recipe
    assert recipe.profile.steps == (10, 20)
    assert recipe.run_name() == load_recipe(["routing"]).recipe.run_name()
    assert "profile" in RESULT_NEUTRAL_KEYS
    assert load_recipe([recipe.to_plain_dict()]).recipe.profile.steps == (10, 20)


def test_memory_is_written_when_training_ends(tmp_path: Path, text: Path) -> None:
    run = train(tmp_path, text, name="memory")
    path = run.path / "memory.json"
    memory = json.loads(path.read_text())
    assert memory.keys() == {"device", "peak", "total", "categories"}
    assert memory["device"] == "cpu"
    assert memory["categories"]["weights"] > 0
    assert memory["peak"] == sum(memory["categories"].values())
    path.write_text("of the run that trained")
    train(tmp_path, text, name="memory")  # nothing is left to train
    assert path.read_text() == "of the run that trained"


def test_a_run_that_runs_out_of_memory_has_the_categories_in_its_error(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    backward = TorchEngine.backward

    def fail_in_step_3(self: Any, step: int, *args: Any) -> Any:
        if step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return backward(self, step, *args)

    monkeypatch.setattr(TorchEngine, "backward", fail_in_step_3)
    code = cli.main(train_arguments(tmp_path, text, name="full", **{"profile.steps": "2-5"}))
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert code == OutOfMemory.code
    assert "out of memory on cpu (" in error
    assert "GiB) with a micro-batch of 4: " in error
    assert "program " in error
    assert error.endswith("lower training.micro_batch_size or set it to auto")
    memory = json.loads((tmp_path / "full" / "memory.json").read_text())
    assert memory["categories"]["gradients"] == 0  # the forward pass of the step had not begun
    assert list_steps(tmp_path / "full") == ["step 2", "step 3"]


@pytest.mark.parametrize("method", ["_update", "snapshot"])
def test_out_of_memory_outside_a_forward_pass_has_the_categories(
    method: str, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def fail(self: Any, *args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TorchEngine, method, fail)
    assert cli.main(train_arguments(tmp_path, text, name="full")) == OutOfMemory.code
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert "out of memory on cpu (" in error
    assert "program " in error
    assert error.endswith("use a smaller model or a smaller batch")
    assert (tmp_path / "full" / "memory.json").is_file()
