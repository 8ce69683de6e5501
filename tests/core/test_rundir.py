"""The run directory: one writer, atomic writes, no step logged twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bottega.core.callback import Progress
from bottega.core.errors import BottegaError, DirectoryInUse, EnvironmentProblem, UsageError
from bottega.core.rundir import Lock, RunDirectory
from bottega.metrics_log import MAX_LINE_BYTES, iterate_rows, read_metrics, truncate_metrics

HOLD = """
import sys, time
from pathlib import Path
from bottega.core.rundir import Lock, RunDirectory
with Lock(RunDirectory(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


def test_second_writer_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with Lock(RunDirectory(tmp_path)):
        with pytest.raises(DirectoryInUse, match=f"{tmp_path} is in use by process {os.getpid()} on ") as caught:
            Lock(RunDirectory(tmp_path)).__enter__()
        assert caught.value.code == 9
    with Lock(RunDirectory(tmp_path)):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DirectoryInUse, match=f"process {holder.pid}"):
            Lock(RunDirectory(tmp_path)).__enter__()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with Lock(RunDirectory(tmp_path)):
            assert json.loads((tmp_path / "LOCK").read_text())["pid"] == os.getpid()
    finally:
        holder.kill()
        holder.communicate()


def test_invalid_lock_file_does_not_prevent_locking(tmp_path: Path) -> None:
    (tmp_path / "LOCK").write_text("{")
    with Lock(RunDirectory(tmp_path)):
        (tmp_path / "LOCK").write_text("{")
        with pytest.raises(DirectoryInUse, match="in use by another process"):
            Lock(RunDirectory(tmp_path)).__enter__()


@pytest.mark.parametrize("path", ["file/run", "/proc/bottega/run"])
def test_a_directory_that_cannot_be_written_is_an_environment_problem(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        RunDirectory(tmp_path / path).create()


def test_file_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    run.write(run.recipe, "old\n")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(BottegaError, match="the disk is full"):
        run.write(run.recipe, "new\n")
    assert os.listdir(tmp_path) == ["recipe.yaml"]
    assert run.recipe.read_text() == "old\n"


def test_unknown_run_suggests_the_nearest_name(tmp_path: Path) -> None:
    for name in ("my-first-run", "another", "my-frist-runs"):
        (tmp_path / name).mkdir()
    for name in ("my-first-run", "another"):
        (tmp_path / name / "recipe.yaml").write_text("")
    with pytest.raises(UsageError, match=r"did you mean .*my-first-run") as caught:
        RunDirectory(tmp_path / "my-frist-run").must_exist()
    assert caught.value.code == 2
    with pytest.raises(UsageError, match=r"start one with `bottega train`"):
        RunDirectory(tmp_path / "summer").must_exist()


def make_row(step: int, kind: str = "train", *, batch: int = 4) -> dict[str, object]:
    return {"step": step, "kind": kind, "samples": step * batch, "loss": 1.0}


def truncate_and_read(run: RunDirectory, progress: Progress) -> list[tuple[int, str]]:
    truncate_metrics(run.metrics, progress)
    return [(r["step"], r["kind"]) for r in read_metrics(run.metrics)]


def test_metrics_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    truncate_metrics(run.metrics, Progress())  # there is no file yet
    rows = [make_row(1), make_row(2), make_row(2, "eval"), make_row(3), make_row(4), make_row(4, "eval")]
    run.metrics.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 5, "kind": "tr')
    assert truncate_and_read(run, Progress(step=3, samples=12, evaluated_step=2)) == [
        (1, "train"),
        (2, "train"),
        (2, "eval"),
        (3, "train"),
    ]
    assert truncate_and_read(run, Progress(step=2, samples=8, evaluated_step=2)) == [
        (1, "train"),
        (2, "train"),
        (2, "eval"),
    ]
    # The checkpoint of step 2 was written before its evaluation, which will run again.
    assert truncate_and_read(run, Progress(step=2, samples=8, evaluated_step=0)) == [(1, "train"), (2, "train")]
    assert truncate_and_read(run, Progress()) == []


def test_metrics_are_truncated_by_samples_after_a_batch_size_change(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.metrics.write_text("".join(json.dumps(make_row(step)) + "\n" for step in range(1, 9)))
    assert len(truncate_and_read(run, Progress(step=3, samples=24, evaluated_step=3))) == 6, (
        "24 samples are six steps of four"
    )


def test_invalid_metrics_lines_are_skipped(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    invalid = [b"[]", b"", b'{"kind": "train"}', b"null", b'{"step": 2, "kind": "train", "samples": "x"}', b"\xff\x00"]
    run.metrics.write_bytes(b"\n".join([json.dumps(make_row(1)).encode(), *invalid]) + b"\n")
    truncate_metrics(run.metrics, Progress(step=5, samples=20))
    assert read_metrics(run.metrics) == [make_row(1)]


def test_only_objects_are_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    nested = b"[" * 100_000
    lines = [b"5", b"[1]", b"null", b'"text"', b"{", nested, b"\xff", b'{"long": "' + b"x" * MAX_LINE_BYTES]
    path.write_bytes(b"\n".join([b'{"step": 1}', b"", *lines, b'{"step": 2}']))
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    rows = list(iterate_rows(path))
    assert rows[0] == {"step": 1}
    assert rows[-1] == {"step": 2}
    assert len(rows) >= 2 + len(lines)
    assert rows.count(None) == len(rows) - 2
    truncate_metrics(path, Progress(step=5, samples=20))
    assert list(iterate_rows(tmp_path / "missing.jsonl")) == []
