"""`bottega diagnose` in the terminal, at the end of training, and on input that is not a run or is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bottega
from bottega import cli
from bottega.core.errors import Diverged
from bottega.run_files.record import read_record
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
        ("", "an empty name is not a run"),
    ],
)
def test_what_is_not_a_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("")
    assert run_verb(tmp_path / word if word else word) == 2
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
    assert line.endswith("nothing to diagnose, because no logged step can be read from metrics.jsonl")
    assert sorted(path.name for path in run.iterdir()) == before


def test_damaged_files_cost_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_recorded_run(tmp_path / "run", validation=OVERFITTED)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 401, "kind": "tra')
    (run / "data.json").write_text("{")
    (run / "modules.jsonl").write_text("{\n[]\n")
    assert run_verb(run) == 0
    out = capsys.readouterr().out
    assert LINE in out
    assert "note: 1 line of metrics.jsonl is damaged and left out" in out
    assert "note: 2 lines of modules.jsonl are damaged and left out" in out
    assert "note: data.json cannot be read: it is damaged" in out
    reason = "(data.json is missing or cannot be read)"
    assert f"leak between splits, duplicates, class imbalance, validation too small, metric at chance {reason}" in out


def test_log_that_is_a_link_elsewhere_costs_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_recorded_run(tmp_path / "run", validation=OVERFITTED, settings={"logging": {"modules": True}})
    (run / "modules.jsonl").rename(tmp_path / "modules.jsonl")
    (run / "modules.jsonl").symlink_to(tmp_path / "modules.jsonl")
    assert run_verb(run) == 0
    out = capsys.readouterr().out
    assert "note: modules.jsonl is not a file of this run and is left out" in out
    assert "no update-to-weight ratios: modules.jsonl has none that can be read" in out


def test_failed_run_has_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_recorded_run(tmp_path / "run")
    (run / "log.txt").write_text("2026-01-01 10:00:00 ERROR cannot write runs/q: the disk is full\n")
    assert run_verb(run) == 0
    assert ": failed, step 400 (cannot write runs/q: the disk is full)" in capsys.readouterr().out


def test_one_run_that_cannot_be_read_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = (write_recorded_run(tmp_path / name, validation=OVERFITTED) for name in ("good", "bad"))
    (bad / "LOCK").mkdir()
    assert run_verb(good, bad) == 0, "a folder in the place of a lock is not a lock"
    assert capsys.readouterr().out.count(LINE) == 2

    def fail(path: Path) -> Any:
        if path == bad:
            raise PermissionError(13, "Permission denied")
        return read_record(path)

    monkeypatch.setattr("bottega.analysis.diagnose.read_record", fail)
    assert run_verb(good, bad) == 0
    captured = capsys.readouterr()
    assert captured.out.count(LINE) == 1
    assert f"{bad} cannot be read: Permission denied" in captured.err
    assert run_verb(bad) == 5


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
