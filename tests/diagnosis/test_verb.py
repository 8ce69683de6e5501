"""`bottega diagnose` in the terminal, at the end of training, and on input that is not a run or is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bottega
from bottega import cli
from bottega.core.errors import Diverged
from recorded_run import write_recorded_run
from small_illnesses import ILLNESSES, ROUTING

OVERFITTED = {"loss": [1.0, 0.5, 0.9, 0.9, 0.9]}
LINE = (
    "overfitting: the validation loss rose from 0.5 to 0.9 while the training loss fell from 0.4418 to 0.2049 "
    "(steps 160 to 400); try training.max_steps=258; see docs/verbs/diagnose.md#overfitting"
)


def run_verb(*words: object) -> int:
    return cli.main(["diagnose", *map(str, words)])


def test_lines_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_recorded_run(tmp_path / "run", validation=OVERFITTED)
    assert run_verb(run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == LINE
    report = bottega.diagnose(run)
    assert report["lines"] == [LINE]
    assert report["findings"][0]["steps"] == [160, 400]


def test_folder_pattern_and_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ill = write_recorded_run(tmp_path / "ill", validation=OVERFITTED)
    healthy = write_recorded_run(tmp_path / "healthy")
    (tmp_path / "notes.txt").write_text("not a run")
    for words in ([tmp_path], [tmp_path / "*"], [ill, healthy], [ill, healthy, ill]):
        assert run_verb(*words, "--json") == 0
        reports = json.loads(capsys.readouterr().out)["runs"]
        names = {Path(report["run"]).name: [f["name"] for f in report["findings"]] for report in reports}
        assert names == {"ill": ["overfitting"], "healthy": []}
        assert len(reports) == 2
    assert run_verb(ill, healthy, tmp_path / "notes.txt") == 0
    output = capsys.readouterr()
    assert f"{ill}: " in output.out
    assert f"\n\n{healthy}: " in output.out
    assert "note: " in output.err
    assert "notes.txt is not a run and has none" in output.err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("missing", "missing does not exist"),
        ("empty", "empty is not a run and has none: there is neither recipe.yaml nor metrics.jsonl"),
        ("file.txt", "file.txt is not a run and has none"),
        ("no-*", "no-* matches no run"),
        ("a=1", "a=1: diagnose takes no settings"),
    ],
)
def test_what_is_not_a_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("")
    assert run_verb(tmp_path / word) == 2
    output = capsys.readouterr()
    assert message in output.err
    assert len(output.err.splitlines()) == 1
    assert output.out == ""


@pytest.mark.parametrize("content", [None, ""])
def test_run_without_metrics_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    run = write_recorded_run(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    if content is not None:
        (run / "metrics.jsonl").write_text(content)
    before = sorted(path.name for path in run.iterdir())
    assert run_verb(run) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("nothing to diagnose, because metrics.jsonl has no logged step")
    assert sorted(path.name for path in run.iterdir()) == before


def test_damaged_files_cost_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_recorded_run(tmp_path / "run", validation=OVERFITTED)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 401, "kind": "tra')
    (run / "data.json").write_text("{")
    assert run_verb(run) == 0
    out = capsys.readouterr().out
    assert LINE in out
    assert "note: 1 line of metrics.jsonl is damaged and left out" in out
    assert "note: data.json cannot be read: it is damaged" in out


def test_missing_recipe_costs_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_recorded_run(tmp_path / "run", validation=OVERFITTED)
    (run / "recipe.yaml").unlink()
    assert run_verb(run) == 0
    out = capsys.readouterr().out
    assert LINE in out
    assert "note: recipe.yaml cannot be read" in out
    assert "the task, because recipe.yaml cannot be read" in out


def test_end_of_training_prints_the_lines_of_the_verb(tmp_path: Path) -> None:
    settings = {**ROUTING, **ILLNESSES["learning-rate-too-low"].settings, "training.max_steps": 60}
    run = bottega.train("routing/large", {**settings, "output_dir": str(tmp_path), "name": "run"})
    (line,) = bottega.diagnose(run.path)["lines"]
    assert (run.path / "log.txt").read_text().count(line) == 1


def test_run_that_ends_by_divergence_is_diagnosed(tmp_path: Path) -> None:
    settings = {**ROUTING, **ILLNESSES["exploding-gradients"].settings, "output_dir": str(tmp_path), "name": "run"}
    with pytest.raises(Diverged):
        bottega.train("routing/large", settings)
    report = bottega.diagnose(tmp_path / "run")
    assert report["state"] == "diverged"
    assert [finding["name"] for finding in report["findings"]] == ["exploding-gradients"]
    assert (tmp_path / "run" / "log.txt").read_text().count(report["lines"][0]) == 1
