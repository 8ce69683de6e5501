"""Restarts: a second start, another rank or a wrong setting never starts over, evaluates other data or loses a run."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import bottega
from bottega import cli
from bottega.cli.verb import Verb
from bottega.config.data import Source as SourceOptions
from bottega.core.errors import CheckpointError, DataError, UsageError
from bottega.data.sources.external import ExternalData
from bottega.signals import StopSignals
from bottega.tasks.recipes import load_recipe
from small_run import settings, train, write_text


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"data.validation.split": "test"}, "data.validation"),
        ({"data.test.field": "text"}, "data.test"),
        ({"data.train.split": "train"}, "data.train.split"),
        ({"data.tokenizer.path": "somewhere"}, "data.tokenizer.path"),
        ({"evaluation.metric": "acuracy"}, "evaluation.metric"),
        ({"training.early_stopping.metric": "los"}, "did you mean loss"),
        ({"data.validation": None, "training.early_stopping.patience": 2}, "training.early_stopping"),
        ({"model.num_heads": 4, "model.num_kv_heads": 3}, "num_kv_heads"),
        ({"distributed.processes": 4}, "torchrun --nproc_per_node 4"),
        ({"distributed.backend": "nccl"}, "distributed.backend"),
    ],
)
def test_a_setting_without_effect_is_refused_before_anything_is_trained(
    tmp_path: Path, text_file: Path, changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(UsageError, match=key):
        train(tmp_path, text_file, name="never", **changes)
    assert not (tmp_path / "never" / "recipe.yaml").exists(), "so that a corrected command may use the name"


def test_resume_from_is_for_the_first_start_only(tmp_path: Path, text_file: Path, finished_run: Path) -> None:
    """A scheduler repeats the command; the run must resume from its own checkpoints."""
    plain = settings(tmp_path, text_file, **{"name": "child", "training.max_steps": 12})
    command = ["train", "language/shakespeare", *(f"{k}={'null' if v is None else v}" for k, v in plain.items())]
    for _ in range(2):
        assert (
            cli.main([*command, "--quiet", "--resume_from", str(finished_run / "checkpoints" / "step-00000004")]) == 0
        )
    log = (tmp_path / "child" / "log.txt").read_text()
    assert "step-00000004 at step 4 of 12" in log
    assert "step-00000012 at step 12 of 12 (already finished)" in log


def test_evaluate_detects_changed_data(tmp_path: Path) -> None:
    """A byte tokenizer is the same for any text, so only the data differs."""
    text = write_text(tmp_path / "text.txt")
    run = train(tmp_path, text, **{"data.tokenizer.kind": "bytes"})
    assert bottega.load(run.path).evaluate()["loss"] > 0
    write_text(text, seed=1)
    with pytest.raises(DataError, match="has changed"):
        bottega.load(run.path).evaluate()


def test_character_tokens_contain_no_end_of_text(finished_run: Path, text_file: Path) -> None:
    workload = bottega.load(finished_run).workload
    windows = workload.data.read_external(ExternalData(SourceOptions(path=str(text_file))))
    tokens = {int(t) for i in range(len(windows)) for t in windows.rows(*_row_index(i))["input_ids"][0]}
    assert workload.tokenizer.eos_token_id not in tokens  # type: ignore[attr-defined]


def _row_index(index: int) -> tuple[Any, Any]:
    import numpy as np

    return np.array([index]), np.array([0])


def test_the_processor_is_written_once(tmp_path: Path, text_file: Path) -> None:
    run = train(tmp_path, text_file, name="kept").path
    stamps = {path: path.stat().st_mtime_ns for path in (run / "processor").iterdir()}
    train(tmp_path, text_file, **{"name": "kept", "training.max_steps": 12})
    assert {path: path.stat().st_mtime_ns for path in (run / "processor").iterdir()} == stamps


def test_a_damaged_processor_is_named(tmp_path: Path, finished_run: Path) -> None:
    run = shutil.copytree(finished_run, tmp_path / "copy", symlinks=True)
    (run / "processor" / "shape.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"shape\.json"):
        bottega.load(run)


def test_repeated_signal_is_one_request_for_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler signals all processes and the launcher repeats it; a single process exits at the second signal."""
    exit_codes: list[int] = []
    monkeypatch.setattr("bottega.signals.os._exit", exit_codes.append)
    for world, expected in (("2", 0), ("1", 1)):
        monkeypatch.setenv("WORLD_SIZE", world)
        exit_codes.clear()
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert stop.received == signal.SIGTERM
        assert len(exit_codes) == expected, world


def test_json_has_no_infinity(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"metrics": {"loss": math.nan, "rows": [math.inf, 1.0]}}
    monkeypatch.setitem(cli.VERBS, "doctor", Verb("", lambda parser: None, lambda arguments, words: report))
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "metrics": {"loss": None, "rows": [None, 1.0]}
    }


@pytest.mark.parametrize(("name", "decay"), [("adamw", 0.1), ("sgd", 0.0), ("adam", 0.0)])
def test_coupled_weight_decay_defaults_to_zero(name: str, decay: float) -> None:
    base = {"task": "language", "model": {"size": "nano"}, "data": {"train": {"kind": "embedded"}}}
    training = {"max_steps": 1, "optimizer": {"name": name}}
    assert load_recipe([{**base, "training": training}]).recipe.training.weight_decay == decay
    assert load_recipe([{**base, "training": {**training, "weight_decay": 0.3}}]).recipe.training.weight_decay == 0.3


def test_python_api_accepts_the_command_line_options(finished_run: Path, text_file: Path) -> None:
    saved = bottega.load(finished_run, checkpoint=4)
    assert saved.checkpoint.name == "step-00000004"
    assert saved.evaluate(text_file)["loss"] > 0
    assert len(saved.generate("alpha", max_tokens=3)) == 1
