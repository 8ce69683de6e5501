"""Data of an evaluation: training samples only on request, other data by its path, from any working directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import bottega
import small_media
import small_texts
from bottega import cli
from bottega.core.errors import BottegaError, DataError, UsageError

SPLITS = {"data.validation.split": 0.25, "data.test": {"split": 0.125}, "data.split": {"by": "fraction"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was trained on a relative path."""
    folder = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        settings = small_texts.settings(folder, **SPLITS)
        bottega.train("classify", {**settings, "data.train.path": "texts.jsonl", "output_dir": "runs", "name": "run"})
    return folder


def run_evaluate(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    capsys.readouterr()  # output of earlier commands
    assert cli.main(["evaluate", *arguments, "--json"]) == code
    output = capsys.readouterr()
    return json.loads(output.out) if code == 0 else output.err


def write_renamed_texts(path: Path, count: int = 30) -> Path:
    """Write texts that are not in the training data, with other field names."""
    rows = [{"review": row["text"], "stars": row["label"]} for row in small_texts.make_rows(count, seed=9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_training_file_is_evaluated_on_its_held_out_split(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = str(folder / "runs" / "run"), folder / "texts.jsonl"
    config = tmp_path / "test.yaml"
    # The fraction has no effect: the samples are those that the run itself held out, 12 of 96.
    config.write_text(f"data: {{train: {{path: {data}}}, test: {{split: 0.5}}}}\n")
    copy = shutil.copy(data, tmp_path / "copy.jsonl")
    own = {split: run_evaluate(capsys, run, "--split", split) for split in ("validation", "test", "train")}
    assert {split: result["samples"] for split, result in own.items()} == {"validation": 24, "test": 12, "train": 60}
    for arguments, split in (
        (["--data_config", str(config), "--split", "test"], "test"),
        (["--data_config", str(config)], "test"),
        (["--data", str(data)], "validation"),
        (["--data", str(copy), "--split", "test"], "test"),
        (["--data", str(data), "--split", "train"], "train"),
    ):
        result = run_evaluate(capsys, run, *arguments)
        assert result["metrics"] == own[split]["metrics"], arguments
        assert (result["split"], result["samples"]) == (split, own[split]["samples"]), arguments
        assert str(Path(arguments[1]).name if arguments[0] == "--data" else data.name) in result["notes"][0]
    assert bottega.load(run).evaluate(data) == own["validation"]["metrics"]


def test_training_data_without_a_held_out_split_is_refused(tmp_path: Path) -> None:
    texts = small_texts.write_texts(tmp_path)
    settings = {**small_texts.settings(tmp_path), "data.validation": None, "data.split": None, "name": "whole"}
    run = bottega.train("classify", settings).path
    with pytest.raises(UsageError, match=r"which has no validation split.*split train"):
        bottega.evaluate(run, data=texts)
    assert bottega.evaluate(run, data=texts, split="train")["samples"] == 96
    more = tmp_path / "more"
    more.mkdir()
    shutil.copy(texts, more / "a.jsonl")
    small_texts.write_texts(more, "b.jsonl", seed=3)
    with pytest.raises(UsageError, match=r"a\.jsonl is training data of this run"):
        bottega.evaluate(run, data=more)
    assert bottega.evaluate(run, data=more / "b.jsonl")["samples"] == 96


def test_fields_come_from_the_data_config_or_the_command_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = str(folder / "runs" / "run"), write_renamed_texts(tmp_path / "other.jsonl")
    config = tmp_path / "other.yaml"
    config.write_text(f"data:\n  train: {{path: {other}, field: review}}\n  label_field: stars\n")
    held_out = tmp_path / "held.yaml"
    held_out.write_text(f"data:\n  train: {{path: gone, field: review, label: stars}}\n  test: {{path: {other}}}\n")
    results = [
        run_evaluate(capsys, run, "--data", str(other), "data.train.field=review", "data.train.label=stars"),
        run_evaluate(
            capsys, "--data", str(other), "data.train.field=review", "data.label_field=stars", "--model_path", run
        ),
        run_evaluate(capsys, run, "--data_config", str(config)),
        run_evaluate(capsys, run, "--data_config", str(held_out), "--split", "test"),
        bottega.evaluate(run, data=other, settings={"data.train.field": "review", "data.train.label": "stars"}),
    ]
    assert all(result["metrics"] == results[0]["metrics"] and result["samples"] == 30 for result in results)
    assert "no field 'text'" in run_evaluate(capsys, run, "--data", str(other), code=3)
    assert "applies to other data only" in run_evaluate(capsys, run, "data.train.field=review", code=2)
    assert "only keys of the data" in run_evaluate(capsys, run, "--data", str(other), "training.max_steps=3", code=2)


def test_report_names_split_samples_and_checkpoint(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(folder / "runs" / "run")
    cli.main(["evaluate", run, "--split", "test", "--out", str(tmp_path)])
    first = capsys.readouterr().out.splitlines()[0]
    written = json.loads((tmp_path / "metrics.json").read_text())
    best = Path(written["checkpoint"]).name
    assert first == f"measured on the test split: 12 samples, checkpoint {best}"
    assert (written["split"], written["samples"], written["data"]) == ("test", 12, None)
    assert best == (folder / "runs" / "run" / "checkpoints" / "best").resolve().name


@pytest.mark.parametrize("name", ["best", "last", "step-00000004"])
def test_checkpoint_can_be_given_by_its_path(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder / "runs" / "run"
    checkpoint = run / "checkpoints" / name
    option = name.removeprefix("step-0000000")  # --checkpoint takes best, last or the number of a step
    expected = run_evaluate(capsys, str(run), "--checkpoint", option)
    assert run_evaluate(capsys, "--model_path", str(checkpoint)) == expected
    assert bottega.predict(checkpoint, ["salt"]) == bottega.predict(run, ["salt"], checkpoint=option)
    assert bottega.load(checkpoint).checkpoint.name == Path(expected["checkpoint"]).name
    for arguments in (["predict", str(checkpoint), "salt"], ["ledger", str(checkpoint), "--step", "1"]):
        assert cli.main(arguments) == 0, arguments
    assert cli.main(["inspect", str(checkpoint)]) == 0
    assert "keep one" in run_evaluate(capsys, str(checkpoint), "--checkpoint", "7", code=2)


def test_run_is_used_from_another_working_directory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = shutil.copytree(folder, tmp_path / "moved", symlinks=True)
    here = tmp_path / "here"
    here.mkdir()
    (here / "texts.jsonl").write_text('{"text": "another file of that name", "label": "cook"}\n')
    monkeypatch.chdir(here)
    expected = run_evaluate(capsys, str(folder / "runs" / "run"))
    assert expected["samples"] == 24
    for arguments in (["ledger", "--step", "2", "--replay"], ["inspect"]):
        assert cli.main([arguments[0], str(folder / "runs" / "run"), *arguments[1:]]) == 0
    environment = moved / "runs" / "run" / "environment.json"
    environment.write_text(environment.read_text().replace(str(folder), "/nowhere/at/all"))
    assert run_evaluate(capsys, str(moved / "runs" / "run"))["metrics"] == expected["metrics"], "data next to the run"
    (moved / "texts.jsonl").unlink()
    (here / "texts.jsonl").unlink()
    gone = run_evaluate(capsys, str(moved / "runs" / "run"), code=3)
    assert "texts.jsonl: the data of this run no longer exists in /nowhere/at/all, where the run was started" in gone
    assert "--data" in gone
    assert cli.main(["ledger", str(moved / "runs" / "run"), "--step", "1"]) == 3
    assert "--data" not in capsys.readouterr().err, "ledger has no such option"


def test_unknown_training_data_is_reported(folder: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(folder / "runs", tmp_path / "runs", symlinks=True)
    (moved / "run" / "environment.json").unlink()
    other = write_renamed_texts(tmp_path / "other.jsonl")
    fields = {"data.train.field": "review", "data.train.label": "stars"}
    result = bottega.evaluate(moved / "run", data=other, settings=fields)
    assert "cannot check whether" in result["notes"][0]
    with pytest.raises(DataError, match="the data of this run no longer exists"):
        bottega.evaluate(moved / "run")
    with pytest.raises(BottegaError, match="split dev"):
        bottega.evaluate(moved / "run", split="dev")


def test_prepared_training_data_is_evaluated_on_its_held_out_split(folder: Path, tmp_path: Path) -> None:
    settings = {**small_texts.settings(tmp_path), **SPLITS, "data.train.path": str(folder / "texts.jsonl")}
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items() if key.startswith("data.")]
    assert cli.main(["prepare", "classify", *overrides, "--out", str(tmp_path / "shards")]) == 0
    result = bottega.evaluate(folder / "runs" / "run", data=tmp_path / "shards")
    own = bottega.evaluate(folder / "runs" / "run")
    assert (result["split"], result["samples"], result["metrics"]) == ("validation", 24, own["metrics"])


def test_judge_is_trained_from_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    monkeypatch.chdir(home)
    needs = {"judge": {"recipe": "classify/image", "settings": {"training.max_steps": 2, "model.hidden_size": 8}}}
    settings = {**small_media.image(Path()), "training.max_steps": 2, "needs": needs, "name": "drawn"}
    run = bottega.train("image", {**settings, "output_dir": "runs"}).path.absolute()
    monkeypatch.chdir(away)
    result = bottega.evaluate(run, count=4)
    assert "conditional_accuracy" in result["metrics"]
    assert not any(away.iterdir())
    monkeypatch.chdir(home)
    assert bottega.evaluate("runs/drawn", count=4)["metrics"] == result["metrics"], (
        "the judge must be reused, not trained again"
    )
    assert len(list((home / "runs" / "parts").iterdir())) == 1
