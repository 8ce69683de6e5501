"""`bottega runs`: the list matches the files of each run, in any state."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import bottega
import small_run
from bottega.analysis.runs import format_runs
from bottega.cli import main
from bottega.core import checkpoint
from bottega.core.errors import UsageError
from bottega.core.rundir import Lock, RunDirectory
from bottega.storage.durable import is_locked


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    text = small_run.write_text(root / "text.txt")
    small_run.train(root / "all", text, name="whole")
    small_run.train(root / "all", text, name="part", **{"training.max_steps": 4})
    return root / "all"


def read_row(folder: Path, name: str) -> dict[str, object]:
    (match,) = (run for run in bottega.runs(folder) if run["name"] == name)
    return match


def extend_planned_steps(folder: Path, name: str) -> Path:
    """Double the planned steps in the checkpoints of a run, as if it had been stopped halfway."""
    run = folder / name
    for path in (run / "checkpoints").glob("step-*/progress.json"):
        fields = json.loads(path.read_text())
        path.write_text(json.dumps({**fields, "total": 8}))
    return run


def test_a_finished_run(folder: Path) -> None:
    summary = read_row(folder, "whole")
    assert summary["task"] == "language"
    assert (summary["step"], summary["total"], summary["state"]) == (8, 8, "finished")
    lines = (folder / "whole" / "metrics.jsonl").read_text().splitlines()
    rows = [record for record in map(json.loads, lines) if record["kind"] == "eval"]
    best = min(rows, key=lambda record: record[summary["metric"]])
    assert (summary["best"], summary["best_step"]) == (best[summary["metric"]], best["step"])


def test_a_stopped_a_failed_and_a_diverged_run(folder: Path) -> None:
    run = extend_planned_steps(folder, "part")
    assert read_row(folder, "part")["state"] == "stopped"
    assert "at step 4" in str(read_row(folder, "part")["reason"])
    log = (run / "log.txt").read_text()
    for text, state in (("no space left on device", "failed"), ("the loss was not finite at step 5", "diverged")):
        (run / "log.txt").write_text(f"{log}2026-01-02 03:04:05 ERROR {text}\n")
        assert (read_row(folder, "part")["state"], read_row(folder, "part")["reason"]) == (state, text)
    (run / "log.txt").write_text(log)


def test_a_run_whose_lock_is_held_is_running_at_its_newest_step(folder: Path) -> None:
    run = extend_planned_steps(folder, "part")
    metrics = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(metrics + '{"step": 6, "kind": "train", "samples": 24}\n{"step": 7, "ki')
    with Lock(RunDirectory(run)):
        summary = read_row(folder, "part")
        assert (summary["state"], summary["step"]) == ("running", 6)
    assert read_row(folder, "part")["state"] == "stopped"
    assert read_row(folder, "part")["step"] == 4
    (run / "metrics.jsonl").write_text(metrics)


def test_stale_lock_is_not_held(tmp_path: Path) -> None:
    lock = tmp_path / "LOCK"
    assert not is_locked(lock)
    for content in ("", "{", json.dumps({"host": socket.gethostname(), "pid": 2**22 + 1}), "[" * 100_000):
        lock.write_text(content)
        assert not is_locked(lock)
    lock.unlink()
    os.symlink("/dev/zero", lock)
    assert not is_locked(lock)


def test_damaged_runs_are_listed_and_other_folders_ignored(folder: Path, tmp_path: Path) -> None:
    for name, content in (("broken", "task: [\n"), ("empty", ""), ("bare", "task: language\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text(content)
    (tmp_path / "pictures").mkdir()
    states = {run["name"]: run["state"] for run in bottega.runs(tmp_path)}
    assert states == {"broken": "damaged", "empty": "damaged", "bare": "no checkpoint"}
    assert [run["name"] for run in bottega.runs(folder / "whole")] == ["whole"]
    assert {run["name"] for run in bottega.runs(folder.parent)} == {"all/whole", "all/part"}
    with pytest.raises(UsageError, match="does not exist; give a folder of runs"):
        bottega.runs(tmp_path / "nowhere")


def test_unreadable_run_leaves_the_others_listed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "whole", tmp_path / "whole")
    shutil.copytree(folder / "whole", tmp_path / "locked")
    shutil.rmtree(tmp_path / "locked" / "checkpoints")
    os.symlink("checkpoints", tmp_path / "locked" / "checkpoints")  # a loop, which not even root can list
    assert main(["runs", str(tmp_path)]) == 0
    capsys.readouterr()
    assert read_row(tmp_path, "whole")["state"] == "finished"
    summary = read_row(tmp_path, "locked")
    assert (summary["state"], summary["task"]) == ("damaged", "language")
    assert f"cannot read {tmp_path / 'locked' / 'checkpoints'}" in str(summary["reason"])


def test_unreadable_folder_leaves_the_others_listed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "whole", tmp_path / "whole")
    (tmp_path / "private").mkdir()
    original = Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path.name == "private":
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert [run["name"] for run in bottega.runs(tmp_path)] == ["whole"]


@pytest.mark.parametrize("progress", [{"best": 0.5, "best_step": 0}, {"best": 0.5}, {"best": 0.5, "best_step": 4}])
def test_best_is_shown_only_with_its_step(progress: dict[str, object], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("task: language\n")
    checkpoint.write(run / "checkpoints", step=4, files={}, progress={"step": 4, **progress}, fingerprint={})
    table = format_runs(tmp_path, bottega.runs(tmp_path))
    assert "None" not in table
    assert ("loss 0.5000 at 4" in table) == (progress.get("best_step") == 4)


def test_runs_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"folder": str(folder), "runs": bottega.runs(folder)}
    assert main(["runs", str(folder)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "task", "step", "best", "changed", "state"]
    assert any("whole" in line and "8/8" in line and line.endswith("finished") for line in lines)
    assert main(["runs", str(tmp_path)]) == 0
    assert "no runs in" in capsys.readouterr().out
    assert main(["runs", str(tmp_path / "nowhere")]) == 2
