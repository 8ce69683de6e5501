"""Background saving: one save at a time, announced when on disk, retried when the disk is full."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from bottega.core import checkpoint
from bottega.core.callback import Progress
from bottega.core.engine import Snapshot
from bottega.core.errors import CheckpointError, EnvironmentProblem
from bottega.core.saver import MAX_FAILED_SAVES, NUM_ATTEMPTS, Saver, explain_os_error
from bottega.core.types import Tensors
from bottega.run.disk_space import check_disk_space


class BlockingSnapshot(Snapshot):
    """A snapshot whose files may wait for an event, like a copy from a device."""

    def __init__(self, value: float, *, go: threading.Event | None = None) -> None:
        self.value, self.go = value, go

    def files(self) -> Mapping[str, Tensors]:
        if self.go is not None:
            assert self.go.wait(100)
        return {"model.safetensors": {"w": np.full(8, self.value, np.float32)}}


class RecordedSaver:
    """A saver with its announcements and warnings."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.saved: list[int] = []
        self.warned: list[str] = []
        self.saver = Saver(folder, keep=keep, fingerprint={}, announce=self.announce, warn=self.warned.append)

    def announce(self, progress: Progress, path: Path) -> None:
        assert checkpoint.verify(path).step == progress.step, "announced before it was complete"
        self.saved.append(progress.step)

    def save(self, step: int, **fields: object) -> None:
        self.saver.save(BlockingSnapshot(step), Progress(step=step, **fields))  # type: ignore[arg-type]


def list_steps(folder: Path) -> list[int]:
    return [manifest.step for _, manifest in checkpoint.list_checkpoints(folder)]


def test_training_continues_during_a_save(tmp_path: Path) -> None:
    recorded, go = RecordedSaver(tmp_path), threading.Event()
    progress = Progress(step=1)
    recorded.saver.save(BlockingSnapshot(1.0, go=go), progress)
    progress.step = 99  # the trainer changes its own object
    recorded.saver.poll()
    assert recorded.saved == []
    assert list_steps(tmp_path) == []
    go.set()
    recorded.saver.wait()
    assert recorded.saved == [1]
    assert checkpoint.read_progress(tmp_path / "step-00000001")["step"] == 1


def test_new_save_waits_for_the_previous_one(tmp_path: Path) -> None:
    recorded, go = RecordedSaver(tmp_path), threading.Event()
    recorded.saver.save(BlockingSnapshot(1.0, go=go), Progress(step=1))
    threading.Timer(0.05, go.set).start()
    recorded.save(2)
    assert recorded.saved == [1], "the second save began before the first was announced"
    recorded.saver.wait(final=True)
    assert recorded.saved == [1, 2]


def test_rotation_keeps_the_newest_the_best_and_the_resumed_checkpoint(tmp_path: Path) -> None:
    recorded = RecordedSaver(tmp_path, keep=2)
    recorded.save(1)
    recorded.saver.wait()
    recorded.saver.resumed_from = tmp_path / "step-00000001"
    for step in range(2, 8):
        recorded.save(step, best=0.5, best_step=3)
    recorded.saver.wait()
    assert list_steps(tmp_path) == [7, 6, 3, 1]
    assert checkpoint.read_link(tmp_path, "best") == tmp_path / "step-00000003"
    assert checkpoint.read_link(tmp_path, "last") == tmp_path / "step-00000007"


def fill_disk(monkeypatch: pytest.MonkeyPatch, *, times: int) -> None:
    """Make the next `times` checkpoints fail with a full disk, including their retries."""
    real, failed = checkpoint.write_safetensors, [0]

    def write(path: Path, tensors: Tensors) -> dict[str, object]:
        if failed[0] < times * NUM_ATTEMPTS:
            failed[0] += 1
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, tensors)

    monkeypatch.setattr(checkpoint, "write_safetensors", write)


def test_full_disk_is_a_warning_and_the_next_save_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedSaver(tmp_path)
    recorded.save(1)
    recorded.saver.wait()
    fill_disk(monkeypatch, times=2)
    for step in (2, 3):
        recorded.save(step)
        recorded.saver.wait()
        assert list_steps(tmp_path) == [1], "the older checkpoint alone remains"
        assert not list(tmp_path.glob(".tmp-*"))
    recorded.save(4)
    recorded.saver.wait()
    assert recorded.saved == [1, 4]
    assert len(recorded.warned) == 2
    assert str(tmp_path) in recorded.warned[0]
    assert "the disk is full: needs 32 bytes" in recorded.warned[0]
    assert (
        "bytes free; free some space and run the same command to continue; older checkpoints are kept"
        in recorded.warned[0]
    )


def test_a_disk_that_stays_full_ends_the_run_with_code_5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedSaver(tmp_path)
    recorded.save(1)
    recorded.saver.wait()
    fill_disk(monkeypatch, times=99)
    for step in range(2, MAX_FAILED_SAVES + 1):
        recorded.save(step)
        recorded.saver.wait()
    recorded.save(MAX_FAILED_SAVES + 1)
    with pytest.raises(EnvironmentProblem, match="the disk is full") as caught:
        recorded.saver.wait()
    assert caught.value.code == 5
    assert len(recorded.warned) == MAX_FAILED_SAVES - 1
    assert checkpoint.verify(tmp_path / "step-00000001").step == 1


def test_successful_save_resets_the_failure_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedSaver(tmp_path)
    for step in range(1, 9):
        with pytest.MonkeyPatch.context() as patch:
            if step % MAX_FAILED_SAVES:
                fill_disk(patch, times=1)
            recorded.save(step)
            recorded.saver.wait()
    assert recorded.saved == [3, 6]
    assert len(recorded.warned) == 6


def test_failed_final_save_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedSaver(tmp_path)
    fill_disk(monkeypatch, times=1)
    recorded.save(1)
    with pytest.raises(EnvironmentProblem):
        recorded.saver.wait(final=True)


def test_error_other_than_os_error_is_raised_at_the_next_poll(tmp_path: Path) -> None:
    class Broken(Snapshot):
        def files(self) -> Mapping[str, Tensors]:
            raise CheckpointError("the copy failed")

    recorded = RecordedSaver(tmp_path)
    recorded.saver.save(Broken(), Progress(step=1))
    assert recorded.saver._thread is not None
    recorded.saver._thread.join()
    with pytest.raises(CheckpointError, match="the copy failed"):
        recorded.saver.poll()
    recorded.save(2)  # the next save starts a new thread
    recorded.saver.wait()
    assert recorded.saved == [2]


def test_wait_after_failure_waits_and_only_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, go = RecordedSaver(tmp_path), threading.Event()
    recorded.saver.save(BlockingSnapshot(1.0, go=go), Progress(step=1))
    threading.Timer(0.05, go.set).start()
    recorded.saver.wait_after_failure()
    assert recorded.saved == [1]
    fill_disk(monkeypatch, times=99)
    for step in range(2, 2 + MAX_FAILED_SAVES):
        recorded.save(step)
        recorded.saver.wait_after_failure()
    assert len(recorded.warned) == MAX_FAILED_SAVES, "every failed save is a warning"


def test_failed_save_of_the_best_keeps_the_previous_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = RecordedSaver(tmp_path, keep=1)
    recorded.save(1, best=0.9, best_step=1)
    recorded.saver.wait()
    with pytest.MonkeyPatch.context() as patch:
        fill_disk(patch, times=1)
        recorded.save(2, best=0.8, best_step=2)
        recorded.saver.wait()
    recorded.save(3, best=0.8, best_step=2)
    recorded.save(4, best=0.8, best_step=2)
    recorded.saver.wait()
    assert list_steps(tmp_path) == [4, 1]
    assert checkpoint.read_link(tmp_path, "best") == tmp_path / "step-00000001"


@pytest.mark.parametrize("name", ["mkdir", "rename", "replace", "symlink", "fsync"])
def test_single_failed_system_call_changes_nothing(tmp_path: Path, name: str) -> None:
    """Checkpoints, links and announcements are the same if any one call fails."""

    def save_all(folder: Path) -> tuple[list[int], list[int], object, object]:
        recorded = RecordedSaver(folder, keep=1)
        for step, best in ((1, 1), (2, 2), (3, 2), (4, 2)):
            recorded.save(step, best=0.5, best_step=best)
            recorded.saver.wait()
        links = [checkpoint.read_link(folder, link) for link in ("last", "best")]
        return recorded.saved, list_steps(folder), *(link and link.name for link in links)

    expected = save_all(tmp_path / "undisturbed")
    assert expected == ([1, 2, 3, 4], [4, 2], "step-00000004", "step-00000002")
    real, number = getattr(os, name), 0
    while True:
        number += 1
        calls = [0]

        def fail(*args: object, calls: list[int] = calls, number: int = number, **options: object) -> object:
            calls[0] += 1
            if calls[0] == number:
                raise OSError(errno.EIO, "Input/output error")
            return real(*args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, name, fail)
            assert save_all(tmp_path / f"{name}-{number}") == expected, f"call {number} of {name} failed"
        if calls[0] < number:
            break
    assert number > 4, "the calls were not counted"


def test_rotation_uses_the_best_step_of_progress_and_not_the_link(tmp_path: Path) -> None:
    """A process killed before it updates the link must not lose the best checkpoint."""
    recorded = RecordedSaver(tmp_path, keep=1)
    recorded.save(1, best=0.9, best_step=1)
    recorded.save(2, best=0.8, best_step=2)
    recorded.saver.wait()
    checkpoint.write_link(tmp_path, "best", tmp_path / "step-00000001")
    for step in (3, 4):
        recorded.save(step, best=0.8, best_step=2)
        recorded.saver.wait()
    assert list_steps(tmp_path) == [4, 2]
    assert checkpoint.read_link(tmp_path, "best") == tmp_path / "step-00000002"


def test_disk_space_check_refuses_or_warns_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=1000))

    def check(size: int, keep: int, *, has_best: bool = False) -> list[str]:
        shortages: list[str] = []
        check_disk_space(tmp_path, size=size, keep=keep, has_best=has_best, warn=shortages.append)
        return shortages

    with pytest.raises(EnvironmentProblem, match="1,000 bytes are free"):
        check(501, 1)
    # keep + 1 must fit, since a new checkpoint is written before the old one is deleted.
    available = "1,000 are available; lower checkpoint.keep or free some space"
    assert check(300, 3) == [f"checkpoint.keep=3 needs 1,200 bytes (one more checkpoint while replacing), {available}"]
    assert check(240, 3) == []
    assert check(240, 3, has_best=True) == [
        f"checkpoint.keep=3 needs 1,200 bytes (the best, and one more while replacing), {available}"
    ]
    assert check(100, 3) == []
    # Older checkpoints will be deleted to make room, but not for the first save.
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "model.safetensors").write_bytes(b"x" * 900)
    assert check(900, 1) == []
    with pytest.raises(EnvironmentProblem):
        check(1001, 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO])
def test_system_errors_are_explained_in_one_line(tmp_path: Path, number: int) -> None:
    import os

    problem = explain_os_error(OSError(number, os.strerror(number)), tmp_path / "not" / "there", 4096)
    assert problem.code == 5
    assert "\n" not in str(problem)
    assert str(tmp_path) in str(problem)
    assert "4,096 bytes" in str(problem)
