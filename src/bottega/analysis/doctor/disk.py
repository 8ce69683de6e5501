"""Check the folder of runs: that it can be written, its speed, free space and inodes, and its file system."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bottega.analysis.doctor.check_result import CheckResult, Problem
from bottega.core.errors import UsageError
from bottega.measurements import format_bytes

TEST_BYTES, BLOCK_BYTES, SMALL_BYTES = 64 << 20, 1 << 20, 4 << 10
MAX_WRITE_SECONDS = 10.0
"""A slow disk is measured with less: the speed is known long before 64 MiB are written."""
LEAST_BYTES, FEW_BYTES = 64 << 20, 2 << 30
"""Free space without which no checkpoint of a small model fits, and below which larger ones may not."""
LEAST_INODES = 100
NETWORK_FILE_SYSTEMS = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "afs", "9p", "virtiofs"),
    *("fuse.sshfs", "fuse.gcsfuse", "fuse.s3fs", "fuse.glusterfs", "fuse.juicefs", "wekafs", "panfs"),
)
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


def check_folder_argument(folder: Path) -> None:
    """Raise UsageError if the path, or a parent of it, is a file."""
    existing = find_existing_folder(folder)
    if not existing.is_dir():
        raise UsageError(f"{folder} cannot be a folder of runs: {existing} is not a folder")


def find_existing_folder(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists: training would create the others."""
    absolute = Path(os.path.abspath(folder))
    return next(path for path in (absolute, *absolute.parents) if os.path.lexists(path))


def check_disk(folder: Path, *, is_timed: bool) -> CheckResult:
    """Write a temporary file into the folder of runs, with `is_timed` a large one, and report speed and free space."""
    existing = find_existing_folder(folder)
    values: dict[str, Any] = {"folder": str(folder), "measured_in": str(existing), **_read_space(existing)}
    lines, problems = [], list(_find_space_problems(folder, values))
    try:
        size = min(TEST_BYTES, values.get("free", TEST_BYTES) // 2) if is_timed else SMALL_BYTES
        speeds = measure_speed(existing, max(size, SMALL_BYTES))
        values |= speeds if is_timed else {}
    except OSError as error:
        problems.insert(0, _explain_write_error(folder, error))
    where = str(folder) if existing == Path(os.path.abspath(folder)) else f"{folder} (to be created in {existing})"
    file_system = f", {values['file_system']}" if values.get("file_system") else ""
    lines.append(("folder", where + file_system))
    if "free" in values:
        inodes = f", {values['free_inodes']:,} files" if values.get("free_inodes") is not None else ""
        lines.append(("free", f"{format_bytes(values['free'])} of {format_bytes(values['total'])}{inodes}"))
    if "write" in values:
        read = f", read {values['read'] / 1e6:,.0f} MB/s" if "read" in values else ""
        lines.append(("speed", f"write {values['write'] / 1e6:,.0f} MB/s{read}"))
    return CheckResult("disk", tuple(lines), {"disk": values}, tuple(problems), tuple(_list_notes(folder, values)))


def measure_speed(folder: Path, size: int) -> dict[str, float]:
    """Return the bytes/s of writing and flushing a file, and of reading it again; the file is always removed."""
    from bottega.storage.durable import flush, make_temporary_name  # needs psutil, without which this module must load

    path = make_temporary_name(folder / "disk-speed", ".probe-")
    block = os.urandom(min(BLOCK_BYTES, size))  # a file system that compresses would be too fast on zeros
    written = 0
    try:
        start = time.perf_counter()
        with open(path, "xb", buffering=0) as file:
            while written < size and time.perf_counter() - start < MAX_WRITE_SECONDS:
                written += file.write(block)
        flush(path)
        speeds = {"write": written / (time.perf_counter() - start)}
        if _drop_cached_pages(path):
            start = time.perf_counter()
            with open(path, "rb", buffering=0) as file:
                while file.read(BLOCK_BYTES):
                    pass
            speeds["read"] = written / (time.perf_counter() - start)
        return speeds
    finally:
        path.unlink(missing_ok=True)


def _drop_cached_pages(path: Path) -> bool:
    """Make the next read of the file come from the disk; return False where that cannot be asked for, and a read says nothing."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _read_space(folder: Path) -> dict[str, Any]:
    usage = shutil.disk_usage(folder)
    values: dict[str, Any] = {"free": usage.free, "total": usage.total, "file_system": _find_file_system(folder)}
    if hasattr(os, "statvfs"):
        status = os.statvfs(folder)
        values["free_inodes"] = status.f_favail if status.f_files else None  # some file systems do not count them
    return values


def _find_file_system(folder: Path) -> str | None:
    """Return the type of the file system of a folder, such as ext4: that of the longest mount point above it."""
    path = folder.resolve()
    try:
        import psutil

        mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    except Exception:  # a container may hide the list of mounts
        return None
    # Of two mounts on one point the later one covers the other.
    return max(reversed(mounts), key=lambda part: len(part.mountpoint)).fstype if mounts else None


def _find_space_problems(folder: Path, values: dict[str, Any]) -> Iterator[Problem]:
    if (free := values["free"]) < FEW_BYTES:
        yield Problem(
            "disk",
            f"only {format_bytes(free)} are free for {folder}, so checkpoints may not fit",
            "free some space, or choose another disk with output_dir",
            stops_training=free < LEAST_BYTES,
        )
    if (inodes := values.get("free_inodes")) is not None and inodes < LEAST_INODES:
        yield Problem(
            "disk",
            f"the file system of {folder} can hold only {inodes} more files (inodes)",
            "delete files there, or choose another disk with output_dir",
            stops_training=True,
        )


def _explain_write_error(folder: Path, error: OSError) -> Problem:
    remedies = {
        errno.ENOSPC: "free some space, or choose another disk with output_dir",
        errno.EDQUOT: "the quota is used up: delete files, or choose another disk with output_dir",
        errno.EFBIG: "the size of files is limited; raise it with ulimit -f unlimited",
    }
    remedy = remedies.get(error.errno or 0, "change its permissions or mount options, or choose another output_dir")
    return Problem("disk", f"{folder} cannot be written: {error.strerror or error}", remedy, stops_training=True)


def _list_notes(folder: Path, values: dict[str, Any]) -> Iterator[str]:
    file_system = values.get("file_system")
    if file_system in NETWORK_FILE_SYSTEMS:
        yield f"{folder} is on a network file system ({file_system}); prepare large data on a local disk (XDG_CACHE_HOME)"
    elif file_system in MEMORY_FILE_SYSTEMS:
        yield f"{folder} is in memory ({file_system}): runs take memory and are lost when the machine restarts"
    elif file_system == "overlay":
        yield f"{folder} is in the container's own layer and is lost with it; mount a volume for runs that must stay"
