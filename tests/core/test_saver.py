"""Saving behind training: one at a time, announced when on disk, and a disk that is full ends nothing at once."""

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
from bottega.core.saver import MAX_FAILED_SAVES, TRIES, Saver, check_disk_space, explain_os_error
from bottega.core.types import Tensors


class Fixed(Snapshot):
    """A snapshot that can be made to wait, as a copy from a device would."""

    def __init__(self, value: float, *, go: threading.Event | None = None) -> None:
        self.value, self.go = value, go

    def files(self) -> Mapping[str, Tensors]:
        if self.go is not None:
            assert self.go.wait(100)
        return {"model.safetensors": {"w": np.full(8, self.value, np.float32)}}


class Story:
    """A saver and what it said."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.saved: list[int] = []
        self.warned: list[str] = []
        self.saver = Saver(folder, keep=keep, fingerprint={}, announce=self.announce, warn=self.warned.append)

    def announce(self, progress: Progress, path: Path) -> None:
        assert checkpoint.verify(path).step == progress.step, "announced only when it is whole"
        self.saved.append(progress.step)

    def save(self, step: int, **fields: object) -> None:
        self.saver.save(Fixed(step), Progress(step=step, **fields))  # type: ignore[arg-type]


def steps(folder: Path) -> list[int]:
    return [manifest.step for _, manifest in checkpoint.list_checkpoints(folder)]


def test_training_goes_on_while_a_save_is_written(tmp_path: Path) -> None:
    story, go = Story(tmp_path), threading.Event()
    progress = Progress(step=1)
    story.saver.save(Fixed(1.0, go=go), progress)
    progress.step = 99  # the loop goes on with its own
    story.saver.poll()
    assert story.saved == []
    assert steps(tmp_path) == []
    go.set()
    story.saver.wait()
    assert story.saved == [1]
    assert checkpoint.read_progress(tmp_path / "step-00000001")["step"] == 1


def test_a_new_save_waits_for_the_last(tmp_path: Path) -> None:
    story, go = Story(tmp_path), threading.Event()
    story.saver.save(Fixed(1.0, go=go), Progress(step=1))
    threading.Timer(0.05, go.set).start()
    story.save(2)
    assert story.saved == [1], "the second began only after the first was announced"
    story.saver.wait(final=True)
    assert story.saved == [1, 2]


def test_keeps_the_newest_the_best_and_the_one_resumed_from(tmp_path: Path) -> None:
    story = Story(tmp_path, keep=2)
    story.save(1)
    story.saver.wait()
    story.saver.resumed_from = tmp_path / "step-00000001"
    for step in range(2, 8):
        story.save(step, best=0.5, best_step=3)
    story.saver.wait()
    assert steps(tmp_path) == [7, 6, 3, 1]
    assert checkpoint.read_link(tmp_path, "best") == tmp_path / "step-00000003"
    assert checkpoint.read_link(tmp_path, "last") == tmp_path / "step-00000007"


def full(monkeypatch: pytest.MonkeyPatch, *, times: int) -> None:
    """The next `times` checkpoints find the disk full in the middle of a file, however often they are tried."""
    real, failed = checkpoint.write_safetensors, [0]

    def write(path: Path, tensors: Tensors) -> dict[str, object]:
        if failed[0] < times * TRIES:
            failed[0] += 1
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, tensors)

    monkeypatch.setattr(checkpoint, "write_safetensors", write)


def test_a_full_disk_is_a_warning_and_the_next_save_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(tmp_path)
    story.save(1)
    story.saver.wait()
    full(monkeypatch, times=2)
    for step in (2, 3):
        story.save(step)
        story.saver.wait()
        assert steps(tmp_path) == [1], "the older one is kept, the half-written one is gone"
        assert not list(tmp_path.glob(".tmp-*"))
    story.save(4)
    story.saver.wait()
    assert story.saved == [1, 4]
    assert len(story.warned) == 2
    assert str(tmp_path) in story.warned[0]
    assert "the disk is full: needs 32 bytes" in story.warned[0]
    assert (
        "bytes free; free some space and run the same command to continue; older checkpoints are kept"
        in story.warned[0]
    )


def test_a_disk_that_stays_full_ends_the_run_with_code_5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(tmp_path)
    story.save(1)
    story.saver.wait()
    full(monkeypatch, times=99)
    for step in range(2, MAX_FAILED_SAVES + 1):
        story.save(step)
        story.saver.wait()
    story.save(MAX_FAILED_SAVES + 1)
    with pytest.raises(EnvironmentProblem, match="the disk is full") as caught:
        story.saver.wait()
    assert caught.value.code == 5
    assert len(story.warned) == MAX_FAILED_SAVES - 1
    assert checkpoint.verify(tmp_path / "step-00000001").step == 1


def test_success_in_between_starts_the_patience_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(tmp_path)
    for step in range(1, 9):
        with pytest.MonkeyPatch.context() as patch:
            if step % MAX_FAILED_SAVES:
                full(patch, times=1)
            story.save(step)
            story.saver.wait()
    assert story.saved == [3, 6]
    assert len(story.warned) == 6


def test_the_last_save_has_no_second_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(tmp_path)
    full(monkeypatch, times=1)
    story.save(1)
    with pytest.raises(EnvironmentProblem):
        story.saver.wait(final=True)


def test_an_error_that_is_no_disk_error_surfaces_at_the_next_poll(tmp_path: Path) -> None:
    class Broken(Snapshot):
        def files(self) -> Mapping[str, Tensors]:
            raise CheckpointError("the copy failed")

    story = Story(tmp_path)
    story.saver.save(Broken(), Progress(step=1))
    assert story.saver._thread is not None
    story.saver._thread.join()
    with pytest.raises(CheckpointError, match="the copy failed"):
        story.saver.poll()
    story.save(2)  # and the next save starts a new writer
    story.saver.wait()
    assert story.saved == [2]


def test_the_end_of_a_failed_run_waits_and_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story, go = Story(tmp_path), threading.Event()
    story.saver.save(Fixed(1.0, go=go), Progress(step=1))
    threading.Timer(0.05, go.set).start()
    story.saver.wait_after_failure()
    assert story.saved == [1]
    full(monkeypatch, times=99)
    for step in range(2, 2 + MAX_FAILED_SAVES):
        story.save(step)
        story.saver.wait_after_failure()
    assert len(story.warned) == MAX_FAILED_SAVES, "the last of them would have ended the run"


def test_a_best_checkpoint_whose_save_failed_does_not_cost_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(tmp_path, keep=1)
    story.save(1, best=0.9, best_step=1)
    story.saver.wait()
    with pytest.MonkeyPatch.context() as patch:
        full(patch, times=1)
        story.save(2, best=0.8, best_step=2)
        story.saver.wait()
    story.save(3, best=0.8, best_step=2)
    story.save(4, best=0.8, best_step=2)
    story.saver.wait()
    assert steps(tmp_path) == [4, 1]
    assert checkpoint.read_link(tmp_path, "best") == tmp_path / "step-00000001"


@pytest.mark.parametrize("name", ["mkdir", "rename", "replace", "symlink", "fsync"])
def test_one_failed_operation_changes_nothing(tmp_path: Path, name: str) -> None:
    """Each call of a kind fails once: the same checkpoints, links and announcements as without."""

    def save_all(folder: Path) -> tuple[list[int], list[int], object, object]:
        story = Story(folder, keep=1)
        for step, best in ((1, 1), (2, 2), (3, 2), (4, 2)):
            story.save(step, best=0.5, best_step=best)
            story.saver.wait()
        links = [checkpoint.read_link(folder, link) for link in ("last", "best")]
        return story.saved, steps(folder), *(link and link.name for link in links)

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
    assert number > 4, "the calls were seen"


def test_rotation_asks_progress_and_not_the_link(tmp_path: Path) -> None:
    """A process that was killed before it had set the link must not cost the best checkpoint."""
    story = Story(tmp_path, keep=1)
    story.save(1, best=0.9, best_step=1)
    story.save(2, best=0.8, best_step=2)
    story.saver.wait()
    checkpoint.write_link(tmp_path, "best", tmp_path / "step-00000001")
    for step in (3, 4):
        story.save(step, best=0.8, best_step=2)
        story.saver.wait()
    assert steps(tmp_path) == [4, 2]
    assert checkpoint.read_link(tmp_path, "best") == tmp_path / "step-00000002"


def test_preflight_refuses_what_cannot_fit_and_warns_of_what_will_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=1000))
    with pytest.raises(EnvironmentProblem, match="1,000 bytes are free"):
        check_disk_space(tmp_path, size=501, keep=1)
    check_disk_space(tmp_path, size=300, keep=3)
    assert "lower checkpoint.keep" in capsys.readouterr().err
    check_disk_space(tmp_path, size=100, keep=3)
    assert capsys.readouterr().err == ""
    # What an earlier start left there makes room, but not for the first save.
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "model.safetensors").write_bytes(b"x" * 900)
    check_disk_space(tmp_path, size=900, keep=1)
    assert capsys.readouterr().err == ""
    with pytest.raises(EnvironmentProblem):
        check_disk_space(tmp_path, size=1001, keep=1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO])
def test_system_errors_are_explained_in_one_line(tmp_path: Path, number: int) -> None:
    import os

    problem = explain_os_error(OSError(number, os.strerror(number)), tmp_path / "not" / "there", 4096)
    assert problem.code == 5
    assert "\n" not in str(problem)
    assert str(tmp_path) in str(problem)
    assert "4,096 bytes" in str(problem)
