"""Atomic writes: whenever a process dies, a file or folder is the old version, the new version, or absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from bottega.storage import durable
from bottega.storage.durable import (
    make_temporary_name,
    remove_leftovers,
    replacing_file,
    resumable_folder,
    scratch_folder,
    write_atomic,
    writing_folder,
)

OPERATIONS = ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir")


class Death(BaseException):
    """Simulated death of the process: every later operation fails too, so nothing is cleaned up."""


def die_at_each(work: Callable[[], None], check: Callable[[int], None]) -> int:
    """Run `work` with a death before operation 1, 2, ... until it completes; call `check` after each death."""
    number = 0
    while True:
        number += 1
        left = [number]

        def watch(call: Callable[..., Any], left: list[int] = left) -> Callable[..., Any]:
            def watched(*args: Any, **options: Any) -> Any:
                left[0] -= 1
                if left[0] <= 0:
                    raise Death
                return call(*args, **options)

            return watched

        with pytest.MonkeyPatch.context() as patch:
            for name in OPERATIONS:
                patch.setattr(os, name, watch(getattr(os, name)))
            patch.setattr(durable, "_exchange", watch(durable._exchange))
            try:
                work()
                return number
            except Death:
                pass
        check(number)


def test_file_is_the_old_or_the_new_version_after_a_death(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def check(number: int) -> None:
        assert path.read_text() in ("old", "new"), f"operation {number}"
        remove_leftovers(tmp_path)
        assert os.listdir(tmp_path) == ["a.json"]

    assert die_at_each(lambda: write_atomic(path, "new"), check) > 2, "the operations were intercepted"
    assert path.read_bytes() == b"new"


def test_file_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    flush, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("fsync"), flush(handle))[1])
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("replace"), replace(*paths))[1])
    write_atomic(tmp_path / "new" / "a.bin", b"\0\xff")
    assert events == ["fsync", "replace"]
    assert (tmp_path / "new" / "a.bin").read_bytes() == b"\0\xff"


def test_temporary_name_keeps_the_suffix(tmp_path: Path) -> None:
    with replacing_file(tmp_path / "a.png") as temporary:
        assert temporary.suffix == ".png"
        temporary.write_bytes(b"")
    left = [make_temporary_name(tmp_path / name) for name in ("a.png", "a.tar.gz", "step-00000001", "b.png")]
    for path in left:
        path.write_bytes(b"")
    for name in ("a.png", "a.tar.gz", "step-00000001"):
        remove_leftovers(tmp_path, name)
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "a.png", left[-1]]), (
        "temporary files are matched by their target's name"
    )


@pytest.mark.parametrize("can_exchange", [True, False])
def test_folder_is_the_old_or_the_new_version_after_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(durable, "_exchange", lambda first, second: False)
    target = tmp_path / "out"
    target.mkdir()
    (target / "old.txt").write_text("old")

    def work() -> None:
        with writing_folder(target) as temporary:
            (temporary / "deep").mkdir()
            (temporary / "deep" / "new.txt").write_text("new")

    def check(number: int) -> None:
        remove_leftovers(tmp_path)
        assert os.listdir(tmp_path) == ["out"], f"operation {number}"
        names = sorted(path.name for path in target.rglob("*"))
        assert names in (["old.txt"], ["deep", "new.txt"]), f"operation {number}"

    assert die_at_each(work, check) > 5, "the operations were intercepted"
    assert sorted(path.name for path in target.rglob("*")) == ["deep", "new.txt"]


def test_partial_folder_is_removed_after_an_error(tmp_path: Path) -> None:
    def fail(folder: Callable[[Path], AbstractContextManager[Path]]) -> None:
        with folder(tmp_path / "out") as temporary:
            (temporary / "half").write_text("half")
            raise ValueError("no")

    for folder in (writing_folder, scratch_folder, resumable_folder):
        with pytest.raises(ValueError, match="no"):
            fail(folder)
        assert os.listdir(tmp_path) == []
    with writing_folder(tmp_path / "out"):
        pass
    assert os.listdir(tmp_path) == [], "an empty folder replaces nothing"


def test_existing_folder_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    with writing_folder(target, replace=False) as temporary:  # an empty folder counts as absent
        (temporary / "first").write_text("1")
    with pytest.raises(FileExistsError, match="out"), writing_folder(target, replace=False) as temporary:
        (temporary / "second").write_text("2")
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(target) == ["first"]


def test_resumable_folder_continues_after_an_interrupt(tmp_path: Path) -> None:
    target = tmp_path / "entry"

    def interrupt() -> None:
        with resumable_folder(target) as temporary:
            (temporary / "part").write_text("1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert not target.exists()
    with resumable_folder(target) as temporary:
        assert os.listdir(temporary) == ["part"]
        (temporary / "rest").write_text("2")
    assert os.listdir(tmp_path) == ["entry"]
    assert sorted(os.listdir(target)) == ["part", "rest"]


def test_remove_leftovers_spares_other_writers(tmp_path: Path) -> None:
    with scratch_folder(tmp_path / "out") as temporary:
        remove_leftovers(tmp_path)
        assert temporary.is_dir()
        left = make_temporary_name(tmp_path / "out")
        shutil.copytree(temporary, left)
        remove_leftovers(tmp_path)
        assert not left.exists()
    assert os.listdir(tmp_path) == []


def test_folder_mode_is_applied(tmp_path: Path) -> None:
    with writing_folder(tmp_path / "step-00000001", mode=0o700) as temporary:
        (temporary / "a").write_text("")
    assert (tmp_path / "step-00000001").stat().st_mode & 0o777 == 0o700
