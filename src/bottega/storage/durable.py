"""The only atomic writer: files and folders that are whole or not there, flushed to disk, never written through a link.

A file or folder is written under a temporary name beside its place and renamed when it is complete; a folder that is deleted
is renamed first. `TEMPORARY` and `OLD` are all the names a killed process can leave, and `remove_leftovers` is what sweeps
them. The other modules name no temporary file and call neither `os.rename` nor `os.fsync` (tests/test_architecture.py).
"""

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

TEMPORARY_PREFIXES = (".tmp-", ".trash-", ".probe-")
"""How the names of files begin that only a process that was killed leaves behind."""
OLD_PREFIX = ".old-"
"""How the name of a folder begins while it is being replaced."""

MANY = 64


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


def flush_many(folder: Path) -> None:
    """As `flush_all`, for thousands of small files: one by one takes 2 ms a file. Of many the system reports no error."""
    if sum(1 for _ in folder.rglob("*")) > MANY:
        os.sync()
    else:
        flush_all(folder)


def open_without_following_links(path: str | Path, flags: int) -> int:
    """An opener for `open` that refuses a symbolic link: writing through it would change a file elsewhere."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def temporary_name(path: Path, prefix: str = TEMPORARY_PREFIXES[0]) -> Path:
    """An unused hidden name beside `path`, with the same ending, since libraries that write go by that."""
    return path.with_name(f"{prefix}{path.name}-{uuid.uuid4().hex[:8]}{path.suffix}")


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """A temporary name to write a file or a link to, which then takes the place of `path`; after an error neither is left.

    What was written is not flushed: after a power cut the file may be empty. `write_atomic` flushes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: str | bytes) -> None:
    """Replace a file by one that holds `data`, on disk before it has its name."""
    with replacing_file(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        flush(temporary)


def move_files(paths: Iterable[Path], folder: Path) -> None:
    """Rename each into `folder`, on the same file system, under its own name."""
    for path in paths:
        os.rename(path, folder / path.name)
    flush(folder)


def rename_aside(folder: Path) -> Path:
    """Give a folder the first of the names FOLDER.1, FOLDER.2, ... that is free."""
    number = 1
    while (other := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    os.rename(folder, other)
    return other


def delete_folder(folder: Path) -> None:
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
        old = temporary_name(target, OLD_PREFIX)
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
def scratch_folder(beside: Path, *, mode: int = 0o777) -> Iterator[Path]:
    """An empty folder under a temporary name beside `beside`. It is gone afterwards, unless it was renamed."""
    beside.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(beside)
    try:
        temporary.mkdir(mode=mode)
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            _lock(descriptor)  # as long as we live nobody takes it for a leftover
            yield temporary
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def writing_folder(target: Path, *, replace: bool = True, mode: int = 0o777) -> Iterator[Path]:
    """A temporary folder to fill, which then takes the place of `target`; after an error, or left empty, it is gone.

    With `replace=False` a folder that is there and not empty stays, and FileExistsError is raised.
    """
    with scratch_folder(target, mode=mode) as temporary:
        yield temporary
        if not any(temporary.iterdir()):
            return
        flush_all(temporary)
        if replace:
            replace_folder(temporary, target)
        else:
            _put(temporary, target)


@contextmanager
def resumable_folder(target: Path) -> Iterator[Path]:
    """As `writing_folder`, for long work: what a killed or interrupted process has made of the same `target` is handed to the
    next one. The caller holds a lock on `target`, and nothing lies there."""
    temporary = target.with_name(f"{target.name}.tmp")
    temporary.mkdir(exist_ok=True)
    try:
        yield temporary
        flush_all(temporary)
        _put(temporary, target)
    except KeyboardInterrupt:
        raise  # what is done so far stays for the next time
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _put(new: Path, target: Path) -> None:
    """Rename a whole folder to a free name; an empty folder is one, too."""
    try:
        os.rename(new, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        raise
    flush(target.parent)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Delete what a killed process left half-written (beside the file `name` alone, if given), and restore folders that it
    was replacing. What another process is writing stays."""
    for path in [folder / one for one in os.listdir(folder)]:
        original = _original_name(path.name)
        if name is not None and original != name:
            continue
        if path.name.startswith(OLD_PREFIX) and original and not os.path.lexists(folder / original):
            os.rename(path, folder / original)
        elif not path.name.startswith((*TEMPORARY_PREFIXES, OLD_PREFIX)):
            continue
        elif path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        elif not _is_in_use(path):
            shutil.rmtree(path, ignore_errors=True)


def _original_name(name: str) -> str | None:
    """Of a name that `temporary_name` has made, the one it was made of."""
    match = re.fullmatch(r"\.[a-z]+-(.+)-[0-9a-f]{8}(\.[^.]*)?", name)
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
