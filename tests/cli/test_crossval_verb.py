"""`bottega crossval` on the command line: errors in one line; resuming after a kill, Ctrl-C or a broken fold."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bottega import cli
from small_run import environment, read_logged_steps, run_bottega, write_text
from small_texts import settings, write_texts


def crossval_arguments(folder: Path, **changes: Any) -> list[str]:
    values = {**settings(folder, "cnn"), "training.max_steps": 4, "name": "t", **changes}
    values = {key: value for key, value in values.items() if value != "left out"}
    return ["crossval", "classify", *(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in values.items())]


def run_refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> tuple[int, str]:
    """Run a command that must print one line to standard error; return its exit code and the line."""
    code = cli.main(arguments)
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return code, lines[0]


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        (["--folds", "1"], 2, "--folds 1: expected 2 or more"),
        (["--repeats", "0"], 2, "--repeats 0: expected 1 or more"),
        (["--jobs", "0"], 2, "--jobs 0: expected auto, or 1 or more"),
        (["--jobs", "many"], 2, "--jobs many: expected auto"),
        (["--checkpoint", "7"], 2, "--checkpoint 7: expected best or last"),
        (["--by", "group"], 2, "add --field"),
        (["--by", "class"], 2, "--by"),
        (["--stratified", "--field", "user"], 2, "--field user: applies to --by group or hash, not to stratified"),
        (["--by", "group", "--field", "user"], 3, "no field 'user' to split by"),
        (["--folds", "40"], 3, "class 'cook' has 32 texts, fewer than --folds 40; lower it, or use --by fraction"),
        (
            ["--folds", "97", "--by", "fraction"],
            3,
            "leaves no row for validation (train 96, validation 0); lower --folds 97",
        ),
        (["--folds", "2", "evaluation.metric=f2"], 2, "evaluation.metric: f2 is not measured; choose from"),
        (["--stratified", "data.multi_label=true"], 2, "use --by fraction"),
        (["distributed.strategy=fsdp"], 2, "distributed.strategy: fsdp is not implemented yet"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, expected: str
) -> None:
    exit_code, text = run_refused(capsys, [*crossval_arguments(tmp_path), *options])
    assert (exit_code, expected in text) == (code, True), text
    assert not list(tmp_path.glob("t-crossval/fold-*"))


def test_data_that_cannot_be_split_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_refused(capsys, ["crossval"])[1].startswith("bottega: no recipe given")
    prose = write_text(tmp_path / "prose.txt")
    arguments = ["crossval", "language", f"data.train.path={prose}", f"output_dir={tmp_path}"]
    code, text = run_refused(capsys, arguments)
    assert (code, "prose.txt is one text, which cannot be split across folds" in text) == (3, True)
    image, label = np.zeros((12, 8, 8), np.uint8), np.array(["a"] * 10 + ["b"] * 2)
    np.savez(tmp_path / "few.npz", image=image, label=label)
    own = {"task": "classify", "data.input": "image", "data.train.path": str(tmp_path / "few.npz")}
    (tmp_path / "few.yaml").write_text(json.dumps({**own, "output_dir": str(tmp_path), "training.max_steps": 1}))
    arguments = ["crossval", str(tmp_path / "few.yaml"), "--folds", "3"]
    code, text = run_refused(capsys, arguments)
    assert (code, "class 'b' has 2 samples, fewer than 3 folds" in text) == (3, True), text
    shards = tmp_path / "shards"
    assert cli.main(["prepare", "language", f"data.train.path={prose}", "--out", str(shards)]) == 0
    capsys.readouterr()
    code, text = run_refused(capsys, ["crossval", "language", f"data.train.path={shards}", f"output_dir={tmp_path}"])
    assert (code, "contains shards, which are already split" in text) == (2, True)
    monkeypatch.setenv("RANK", "0")
    assert "start it without torchrun" in run_refused(capsys, crossval_arguments(tmp_path))[1]


def test_second_command_in_the_same_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from bottega.core.rundir import Lock, RunDirectory

    root = RunDirectory(tmp_path / "t-crossval")
    root.create()
    with Lock(root):
        code, text = run_refused(capsys, crossval_arguments(tmp_path))
    assert (code, "is in use by process" in text) == (9, True)


# The real command, interrupted.


def start_command(arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bottega", *arguments]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(condition: Any, *, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def read_files(run: Path) -> dict[str, tuple[int, bytes]]:
    inside = [path for path in run.rglob("*") if path.is_file() and path.name != "LOCK" and "results" not in path.parts]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in inside}


@pytest.mark.slow
def test_killed_command_resumes(tmp_path: Path) -> None:
    """Killed during the second of two folds, whose subprocess may live on; the next command waits for it."""
    arguments = [*crossval_arguments(tmp_path), "--folds", "2", "--jobs", "1"]
    root = tmp_path / "t-crossval"
    process = start_command(arguments)
    wait_until(lambda: (root / "fold-1" / "LOCK").is_file())
    process.kill()
    process.communicate()
    before = read_files(root / "fold-0")
    done = run_bottega([*arguments, "--json"])
    assert done.returncode == 0, done.stderr
    assert read_files(root / "fold-0") == before
    uninterrupted = run_bottega([*arguments[:-1], "2", "--json", "--out", str(tmp_path / "whole")])
    resumed, expected = (json.loads(process.stdout) for process in (done, uninterrupted))
    assert [run["metrics"] for run in resumed["runs"]] == [run["metrics"] for run in expected["runs"]]
    assert read_logged_steps(root / "fold-1") == [1, 2, 3, 4]


@pytest.mark.slow
def test_ctrl_c_saves_every_fold(tmp_path: Path) -> None:
    endless = {"training.max_steps": 1_000_000, "checkpoint.every": None, "evaluation.every": None}
    arguments = [*crossval_arguments(tmp_path, **endless), "--folds", "2", "--jobs", "2"]
    root = tmp_path / "t-crossval"
    process = start_command(arguments)
    wait_until(lambda: all((root / f"fold-{n}" / "metrics.jsonl").is_file() for n in range(2)))
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert err.strip().splitlines()[-1] == (
        "bottega: stopped by SIGINT; each fold has saved a checkpoint, and the same command resumes them"
    )
    for number in range(2):
        assert (root / f"fold-{number}" / "checkpoints" / "last").exists()


@pytest.mark.slow
def test_broken_fold_does_not_stop_the_others(tmp_path: Path) -> None:
    write_texts(tmp_path)
    arguments = [*crossval_arguments(tmp_path), "--folds", "2", "--jobs", "2"]
    broken = tmp_path / "t-crossval" / "fold-0" / "checkpoints" / "step-00000002"
    broken.mkdir(parents=True)
    done = run_bottega(arguments)
    assert done.returncode == 4, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "t-crossval/fold-0: every checkpoint in" in last
    assert last.endswith("; the other folds are saved")
    assert (tmp_path / "t-crossval" / "fold-1" / "checkpoints" / "last").exists()
    shutil.rmtree(broken)
    done = run_bottega(arguments)
    assert done.returncode == 0, done.stderr
    assert "2 folds, 1 already trained" in done.stderr
    assert "fold-1: training" not in done.stderr
    assert "95 % from" in done.stdout
