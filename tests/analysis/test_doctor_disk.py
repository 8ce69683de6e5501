"""`bottega doctor` on the folder of runs, memory and limits: each problem by a real condition or injected values."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import small_run
from bottega.analysis.doctor import disk, limits
from bottega.analysis.doctor.disk import check_disk
from bottega.analysis.doctor.limits import check_limits, find_limit_problems, find_memory_problems

Usage = namedtuple("Usage", "total used free")
MEMORY: dict[str, Any] = {
    "machine": 32 << 30,
    "total": 32 << 30,
    "available": 16 << 30,
    "swap": 0,
    "shared": 16 << 30,
    "can_share": True,
}


def test_speed_and_space_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    result = check_disk(tmp_path, is_timed=True)
    assert result.values["disk"]["write"] > 0
    assert result.values["disk"]["free"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_measured_in_its_parent(tmp_path: Path) -> None:
    result = check_disk(tmp_path / "a" / "runs", is_timed=False)
    assert result.values["disk"]["measured_in"] == str(tmp_path)
    assert f"to be created in {tmp_path}" in dict(result.lines)["folder"]
    assert list(tmp_path.iterdir()) == [], "and not created"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("folder", ["/proc/self", "/sys/kernel"])
def test_a_folder_that_cannot_be_written_stops_training(folder: str) -> None:
    """For root too, who may write everywhere else."""
    problem = check_disk(Path(folder), is_timed=False).problems[0]
    assert problem.message.startswith(f"{folder} cannot be written: ")
    assert problem.stops_training


def test_a_limit_on_the_size_of_files_stops_training(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    code = (
        "import sys; from pathlib import Path; from bottega.analysis.doctor.disk import check_disk\n"
        "result = check_disk(Path(sys.argv[1]), is_timed=True)\n"
        "print(*result.problems, list(Path(sys.argv[1]).iterdir()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=small_run.environment(),
        capture_output=True,
        text=True,
        preexec_fn=limit,
        check=True,
    )
    assert "cannot be written: File too large" in done.stdout
    assert "ulimit -f unlimited" in done.stdout
    assert "stops_training=True" in done.stdout
    assert done.stdout.endswith("[]\n"), "the file is removed"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts a file system")
def test_a_full_file_system_stops_training(tmp_path: Path) -> None:
    script = (
        f"mount -t tmpfs -o size=96k tmpfs {tmp_path} && cat /dev/zero > {tmp_path}/data; "
        f"{sys.executable} -m bottega doctor --quick --dir {tmp_path}; echo code $?; ls -A {tmp_path}"
    )
    command = ["unshare", "--mount", "bash", "-c", script]
    done = subprocess.run(command, env=small_run.environment(), capture_output=True, text=True, check=False)
    if "code " not in done.stdout:
        pytest.skip(f"cannot mount: {done.stderr}")
    words = " ".join(done.stdout.split())  # lines are wrapped
    assert f"{tmp_path} cannot be written: No space left on device" in words
    assert "is in memory (tmpfs)" in words
    assert done.stdout.endswith("code 5\ndata\n")


@pytest.mark.parametrize(
    ("free", "inodes", "messages", "stops"),
    [
        (8 << 30, 1000, [], []),
        (1 << 30, 1000, ["only 1.00 GiB are free"], [False]),
        (1 << 20, 1000, ["only 1.0 MiB are free"], [True]),
        (8 << 30, 3, ["can hold only 3 more files"], [True]),
        (1 << 30, 3, ["only 1.00 GiB are free", "can hold only 3 more files"], [False, True]),
    ],
)
def test_little_space_and_few_inodes(
    free: int, inodes: int, messages: list[str], stops: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: Usage(100 << 30, 0, free))
    monkeypatch.setattr(disk.os, "statvfs", lambda folder: SimpleNamespace(f_files=10**6, f_favail=inodes))
    problems = check_disk(tmp_path, is_timed=False).problems
    assert [problem.stops_training for problem in problems] == stops
    for problem, message in zip(problems, messages, strict=True):
        assert message in problem.message


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.ENOSPC, "free some space"), (errno.EDQUOT, "quota"), (errno.EROFS, "mount")]
)
def test_errors_of_writing_have_their_remedies(
    number: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("bottega.storage.durable.flush", fail)
    (problem,) = check_disk(tmp_path, is_timed=False).problems
    assert os.strerror(number) in problem.message
    assert remedy in problem.remedy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file_system", "note"),
    [
        ("nfs4", "on a network file system (nfs4)"),
        ("tmpfs", "in memory"),
        ("overlay", "container's own layer"),
        ("xfs", None),
    ],
)
def test_file_systems_are_noted(
    file_system: str, note: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4"),
        SimpleNamespace(mountpoint=str(tmp_path), fstype=file_system),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    notes = check_disk(tmp_path, is_timed=False).notes
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]


def test_memory_and_limits_of_this_process() -> None:
    result = check_limits(0)
    assert result.values["memory"]["total"] >= result.values["memory"]["available"] > 0
    assert result.values["limits"]["open_files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.parametrize(
    ("changes", "num_gpus", "messages", "stops"),
    [
        ({}, 8, [], []),
        ({"available": 1 << 30}, 0, ["only 1.00 GiB of memory are available"], [False]),
        ({"available": 100 << 20}, 0, ["only 100 MiB of memory are available"], [True]),
        ({"shared": 64 << 20}, 0, [], []),
        ({"shared": 64 << 20}, 2, ["/dev/shm has only 64.0 MiB, and NCCL needs it"], [False]),
        ({"can_share": False}, 0, ["the system refuses shared memory"], [False]),
        ({"shared": None, "can_share": None}, 2, [], []),
    ],
)
def test_too_little_memory(changes: dict[str, Any], num_gpus: int, messages: list[str], stops: list[bool]) -> None:
    problems = list(find_memory_problems({**MEMORY, **changes}, num_gpus))
    assert [problem.stops_training for problem in problems] == stops
    for problem, message in zip(problems, messages, strict=True):
        assert problem.message.startswith(message)


def test_small_shared_memory_is_noted_with_who_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "read_memory", lambda: {**MEMORY, "shared": 64 << 20})
    result = check_limits(0)
    assert result.problems == ()
    assert "/dev/shm has only 64.0 MiB: loader workers of Bottega do not use it" in result.notes[0]


def test_a_container_limit_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "read_memory", lambda: {**MEMORY, "total": 4 << 30, "available": 3 << 30})
    line = dict(check_limits(0).lines)["memory"]
    assert line == "4.00 GiB, 3.00 GiB available (container limit; the machine has 32.0 GiB), no swap"


@pytest.mark.parametrize(
    ("values", "messages", "stops"),
    [
        ({"open_files": 1024, "processes": None}, [], []),
        ({"open_files": None}, [], []),
        ({"open_files": 256}, ["this process may open only 256 files"], [False]),
        ({"open_files": 20}, ["this process may open only 20 files"], [True]),
        ({"processes": 100}, ["this user may run only 100 processes"], [False]),
        ({}, [], []),
    ],
)
def test_low_limits(values: dict[str, int | None], messages: list[str], stops: list[bool]) -> None:
    problems = list(find_limit_problems(values))
    assert [problem.stops_training for problem in problems] == stops
    for problem, message in zip(problems, messages, strict=True):
        assert problem.message.startswith(message)


def test_limits_of_files_and_address_space_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "read_limits", lambda: {"file_size": 1 << 30, "address_space": 8 << 30})
    monkeypatch.setattr(limits, "read_memory", lambda: MEMORY)
    assert [note.partition(" (ulimit")[0] for note in check_limits(0).notes] == [
        "files are limited to 1.00 GiB",
        "the address space is limited to 8.00 GiB",
    ]


def test_a_system_without_dev_shm_and_resource_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS, and Windows, which has no module `resource`."""
    monkeypatch.setattr(limits, "SHARED_MEMORY_FOLDER", Path("/absent"))
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.setattr("bottega.engines.host_memory.get_available_memory", lambda: 16 << 30)
    result = check_limits(2)
    assert result.problems == ()
    assert result.values["limits"] == {}
    assert [label for label, _ in result.lines] == ["memory"]
