"""The cache of prepared data: an entry is built once by one process; a damaged entry is rebuilt."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from bottega.core.errors import DataError, EnvironmentProblem
from bottega.data.tables.cache import MANIFEST, get_or_build
from bottega.storage.cache_folder import default_cache


class Builder:
    """Writes two files and counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, folder: Path) -> None:
        self.num_calls += 1
        (folder / "data.bin").write_bytes(b"0123456789")
        (folder / "sub").mkdir()
        (folder / "sub" / "more.json").write_text("{}")


def test_entry_is_built_once(tmp_path: Path) -> None:
    build = Builder()
    entry = get_or_build(tmp_path / "new", "key", build)
    assert get_or_build(tmp_path / "new", "key", build) == entry
    assert build.num_calls == 1
    assert (entry / "data.bin").read_bytes() == b"0123456789"
    get_or_build(tmp_path / "new", "other", build)
    assert build.num_calls == 2


def _flip(entry: Path) -> None:
    (entry / "data.bin").write_bytes(b"0123456780")


def _cut(entry: Path) -> None:
    (entry / "data.bin").write_bytes(b"01234")


def _lose_file(entry: Path) -> None:
    (entry / "sub" / "more.json").unlink()


def _lose_manifest(entry: Path) -> None:
    (entry / MANIFEST).unlink()


def _cut_manifest(entry: Path) -> None:
    (entry / MANIFEST).write_bytes((entry / MANIFEST).read_bytes()[:20])


def _replace_by_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("")


@pytest.mark.parametrize("damage", [_flip, _cut, _lose_file, _lose_manifest, _cut_manifest, _replace_by_file])
def test_damaged_entry_is_rebuilt(tmp_path: Path, damage: object) -> None:
    build = Builder()
    entry = get_or_build(tmp_path, "key", build)
    damage(entry)  # type: ignore[operator]
    assert get_or_build(tmp_path, "key", build) == entry
    assert build.num_calls == 2
    assert (entry / "data.bin").read_bytes() == b"0123456789"


def test_temporary_files_of_a_dead_process_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "key.tmp").mkdir()
    (tmp_path / "key.tmp" / "data.bin").write_bytes(b"half")
    build = Builder()
    get_or_build(tmp_path, "key", build)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]


def test_failed_build_leaves_no_entry_and_reports_the_reason(tmp_path: Path) -> None:
    def fail(error: Exception) -> None:
        def build(folder: Path) -> None:
            (folder / "data.bin").write_bytes(b"half")
            raise error

        get_or_build(tmp_path, "key", build)

    with pytest.raises(DataError, match="bad row"):
        fail(DataError("bad row"))
    with pytest.raises(
        EnvironmentProblem, match=r"cannot write prepared data to .*: No space left on device; .* XDG_CACHE_HOME"
    ):
        fail(OSError(errno.ENOSPC, "No space left on device"))
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match=r"cannot write prepared data to .*file/cache"):
        get_or_build(tmp_path / "file" / "cache", "key", Builder())


def test_default_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "bottega"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache() == Path("/home/someone/.cache/bottega")


SCRIPT = """
    import sys, time
    from pathlib import Path
    from bottega.data.tables.cache import get_or_build

    def build(folder):
        with open(sys.argv[2], "a") as log:
            log.write("built\\n")
        time.sleep(0.5)
        (folder / "data.bin").write_bytes(b"0123456789")
        if sys.argv[3] == "die":
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)

    print(get_or_build(Path(sys.argv[1]), "key", build).joinpath("data.bin").read_bytes().decode())
"""


def start_process(tmp_path: Path, end: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), tmp_path / "cache", tmp_path / "log", end]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_concurrent_processes_build_once_and_share_the_entry(tmp_path: Path) -> None:
    outputs = [process.communicate(timeout=100)[0] for process in [start_process(tmp_path, "live") for _ in range(3)]]
    assert outputs == ["0123456789\n"] * 3
    assert (tmp_path / "log").read_text() == "built\n"


def test_killed_builder_is_replaced_by_the_waiting_process(tmp_path: Path) -> None:
    first = start_process(tmp_path, "die")
    while not (tmp_path / "log").exists():  # then it holds the lock
        time.sleep(0.01)
    second = start_process(tmp_path, "live")
    first.communicate(timeout=100)
    out, _ = second.communicate(timeout=100)
    assert out == "0123456789\n"
    assert first.returncode == -9
