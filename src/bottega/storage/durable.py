"""Files and folders that survive a crash: flushed to disk, replaced whole, and never written through a link."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

TEMPORARY = (".tmp-", ".trash-", ".probe-")
"""How the names of files begin that only a process that was killed leaves behind."""
OLD = ".old-"
"""How the name of a folder begins while it is being replaced."""


def flush(path: Path) -> None:
    """Of a file, its content; of a folder, the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_all(folder: Path) -> None:
    """Every file and folder below, and the folder itself."""
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink():
            flush(path)
    flush(folder)


def open_unlinked(path: str | Path, flags: int) -> int:
    """An opener for `open` that refuses a symbolic link: writing through it would change a file elsewhere."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def temporary_name(path: Path, prefix: str = TEMPORARY[0]) -> Path:
    """An unused hidden name beside `path`."""
    return path.with_name(f"{prefix}{path.name}-{uuid.uuid4().hex[:8]}")


def discard(folder: Path) -> None:
    """Delete a folder so that a half-deleted one is never taken for a whole one."""
    trash = temporary_name(folder, ".trash-")
    os.rename(folder, trash)
    shutil.rmtree(trash, ignore_errors=True)


def replace_folder(new: Path, target: Path) -> None:
    """Put the folder `new` in the place of `target`, at once; what was there before is deleted.

    Where the file system cannot exchange two names, the old folder is renamed for a moment; `remove_leftovers` undoes that
    after a crash.
    """
    if not os.path.lexists(target):
        os.rename(new, target)
        flush(target.parent)
        return
    if _exchange(new, target):
        old = new
    else:
        old = temporary_name(target, OLD)
        os.rename(target, old)
        try:
            os.rename(new, target)
        except OSError:
            os.rename(old, target)
            raise
    flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two names change places in one step (Linux); False where that is not possible."""
    at_cwd, exchange = -100, 2
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


@contextmanager
def writing_folder(target: Path) -> Iterator[Path]:
    """A temporary folder to fill, which then takes the place of `target`; after an error, or left empty, it is gone."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(target)
    temporary.mkdir()
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        _lock(descriptor)  # as long as we live nobody takes it for a leftover
        yield temporary
        if any(temporary.iterdir()):
            flush_all(temporary)
            replace_folder(temporary, target)
        else:
            temporary.rmdir()
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Delete what a killed process left half-written (beside the file `name` alone, if given), and restore folders that it
    was replacing. What another process is writing stays."""
    for path in [folder / one for one in os.listdir(folder)]:
        original = _original_name(path.name)
        if name is not None and original != name:
            continue
        if path.name.startswith(OLD) and original and not os.path.lexists(folder / original):
            os.rename(path, folder / original)
        elif not path.name.startswith((*TEMPORARY, OLD)):
            continue
        elif path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        elif not _is_in_use(path):
            shutil.rmtree(path, ignore_errors=True)


def _original_name(name: str) -> str | None:
    """Of a name that `temporary_name` has made, the one it was made of."""
    match = re.fullmatch(r"\.[a-z]+-(.+)-[0-9a-f]{8}", name)
    return match[1] if match else None


def _lock(descriptor: int) -> bool:
    """Whether we hold it now; a file system without locks says yes."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _is_in_use(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a run. One that is dead holds none, so its number is looked at first: to try a
    lock could stand in the way of a run that is just starting."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        owner = json.loads(os.pread(handle, 4096, 0) or b"{}")
        is_here = owner.get("host") == socket.gethostname()
        if is_here and not psutil.pid_exists(int(owner.get("pid", 0))):
            return False
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass  # of a process that is writing it now
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False
