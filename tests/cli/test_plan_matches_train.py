"""`bottega plan` refuses exactly what `bottega train` refuses: the same lines, all at once, and the same exit code."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from bottega import cli
from bottega.core.rundir import Lock, RunDirectory
from config.guide_blocks import ROUTING_ADVANCED
from small_run import settings, write_text


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A small run of the language recipe on the CPU, as a command line."""
    values = settings(tmp_path / "runs", write_text(tmp_path / "text.txt"), device="cpu")
    return ["language/shakespeare", *(f"{key}={'null' if v is None else v}" for key, v in values.items())]


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    code = cli.main(list(arguments))
    return code, capsys.readouterr().err.strip()


REFUSED: dict[str, tuple[list[str], int, list[str]]] = {
    "missing data": (["data.train.path=nowhere.txt"], 3, ["nowhere.txt does not exist"]),
    "missing validation data": (["data.validation.path=gone.txt"], 3, ["gone.txt does not exist"]),
    "missing tokenizer": (
        ["data.tokenizer.kind=pretrained", "data.tokenizer.path=./no/tokenizer.json"],
        3,
        ["./no/tokenizer.json"],
    ),
    "missing base model": (["model.from=./no/model"], 2, ["model.from: ./no/model"]),
    "missing GPU": (["device=mps"], 5, ["device: mps is not available"]),
    "fp16 on a CPU": (["fp16=true"], 2, ["fp16 needs a GPU"]),
    "batch larger than the data": (["training.batch_size=100000"], 3, ["samples, fewer than one batch of 100000"]),
    "processes not started": (
        ["distributed.processes=4"],
        2,
        ["distributed.processes is 4, but the number of processes started is 1"],
    ),
    "launcher not used": (["distributed.enabled=true"], 2, ["distributed.enabled is true"]),
    "engine": (["engine=tpu"], 2, ["engine: expected"]),
    "strategy": (["distributed.strategy=fsdp"], 2, ["distributed.strategy: fsdp is not implemented yet"]),
    "backend of another device": (["distributed.backend=nccl"], 2, ["distributed.backend: nccl"]),
    "label smoothing": (["training.label_smoothing=0.1"], 2, ["training.label_smoothing"]),
    "unmeasured metric": (["evaluation.metric=bleu"], 2, ["evaluation.metric: bleu is not measured"]),
    "pattern of nothing": (["training.freeze=[nothing_like_it]"], 2, ["nothing_like_it"]),
    "no length": (["training.max_steps=null"], 2, ["training.max_steps: missing"]),
    "several at once": (
        [
            "data.train.path=nowhere.txt",
            "fp16=true",
            "training.label_smoothing=0.1",
            "distributed.strategy=fsdp",
            "distributed.processes=4",
            "distributed.backend=nccl",
            "device=mps",
        ],
        2,
        [
            "nowhere.txt",
            "training.label_smoothing is not implemented yet",
            "fsdp",
            "distributed.processes is 4",
            "device: mps",
            "distributed.backend: nccl",
        ],
    ),
    "a mistyped key beside a missing file": (
        ["evaluation.evry=5", "data.train.path=nowhere.txt", "training.label_smoothing=0.1"],
        2,
        ["evaluation.evry: unknown key", "nowhere.txt", "training.label_smoothing"],
    ),
    "data and metric at once": (
        ["training.batch_size=100000", "evaluation.metric=bleu"],
        2,
        ["fewer than one batch of 100000", "evaluation.metric: bleu"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_plan_and_train_refuse_alike(
    case: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, code, parts = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    planned, plan_errors = run_cli(capsys, "plan", *arguments, *overrides, "--check")
    trained, train_errors = run_cli(capsys, "train", *arguments, *overrides)
    assert (planned, trained) == (code, code), (plan_errors, train_errors)
    for part in parts:
        assert part in plan_errors
        assert part in train_errors
    assert "Traceback" not in plan_errors + train_errors
    assert set(plan_errors.splitlines()) <= set(train_errors.splitlines())
    assert not list((tmp_path / "runs").glob("*/checkpoints"))


def test_valid_recipe_is_planned_without_a_run(arguments: list[str], tmp_path: Path, capsys: Any) -> None:
    for plan in (["plan", *arguments], ["plan", *arguments, "--check"]):
        code, err = run_cli(capsys, *plan)
        assert code == 0, err
        assert "valid" in err
    assert not (tmp_path / "runs").exists()


def test_existing_run_of_another_recipe_is_refused_by_both(arguments: list[str], tmp_path: Path, capsys: Any) -> None:
    assert run_cli(capsys, "train", *arguments, "name=a", "--quiet")[0] == 0
    other = [*arguments, "name=a", "training.learning_rate=0.5"]
    planned, plan_errors = run_cli(capsys, "plan", *other)
    trained, train_errors = run_cli(capsys, "train", *other)
    assert (planned, trained) == (2, 2)
    assert "was started with another recipe" in plan_errors
    assert plan_errors == train_errors


def test_foreign_folder_is_refused_by_both(arguments: list[str], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "thesis.txt").write_text("years of work")
    for verb in (["plan"], ["train"]):
        code, err = run_cli(capsys, *verb, *arguments, f"output_dir={tmp_path / 'runs'}", "name=mine")
        assert code == 2
        assert "mine exists and is not a run directory" in err


def test_routing_guide_is_accepted(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """`enabled: false` turns the section off, and its options without effect are reported."""
    monkeypatch.chdir(tmp_path)
    Path("advanced.yaml").write_text(ROUTING_ADVANCED)
    small = ["--max_steps", "2", "data.num_samples=256", "batch_size=8", "device=cpu", "model.hidden_size=16"]
    code, err = run_cli(capsys, "plan", "routing", "advanced.yaml", *small)
    assert code == 0, err
    assert "distributed.enabled: false" in err
    code, err = run_cli(capsys, "train", "routing", "advanced.yaml", *small)
    assert code == 0, err
    assert "distributed.enabled: false" in err


@pytest.mark.parametrize("more", [["distributed.backend=gloo"], ["distributed.offload=true"]])
def test_distributed_options_without_effect_are_accepted(more: list[str], arguments: list[str], capsys: Any) -> None:
    assert run_cli(capsys, "plan", *arguments, *more)[0] == 0
    assert run_cli(capsys, "train", *arguments, *more, "--quiet")[0] == 0


def test_problems_of_a_dependency_are_reported_before_it_is_trained(tmp_path: Path, capsys: Any) -> None:
    arguments = ["image/stickers", f"output_dir={tmp_path}", "device=cpu", "fp16=true"]
    code, err = run_cli(capsys, "plan", *arguments, "needs.vae.settings={distributed: {strategy: fsdp}}")
    assert code == 2
    assert "needs.vae: distributed.strategy: fsdp" in err
    assert "fp16 needs a GPU" in err
    shutil.rmtree(tmp_path, ignore_errors=True)


def test_plan_checks_the_run_directory(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file in its path, a lock, a full disk: checked without creating anything."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        run_arguments = [*arguments, f"output_dir={folder}", "name=x"]
        planned = run_cli(capsys, "plan", "--check", *run_arguments)
        assert planned == run_cli(capsys, "train", *run_arguments)
        assert planned[0] == 5
        assert f"cannot write {folder / 'x'}: " in planned[1]
    run = RunDirectory(tmp_path / "runs" / "held")
    with Lock(run):
        planned = run_cli(capsys, "plan", "--check", *arguments, "name=held")
        assert planned == run_cli(capsys, "train", *arguments, "name=held")
        assert planned[0] == 9
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    code, err = run_cli(capsys, "plan", "--check", *arguments, "name=full")
    assert (code, "a checkpoint needs" in err) == (5, True), err
    assert run_cli(capsys, "train", *arguments, "name=full", "--quiet")[0] == 5
    monkeypatch.undo()
    assert not (tmp_path / "runs" / "planned").exists()
    assert run_cli(capsys, "plan", "--check", *arguments, "name=planned")[0] == 0
    assert not (tmp_path / "runs" / "planned").exists()
