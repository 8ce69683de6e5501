"""Atomic writes of files and folders: complete or absent, flushed to disk, never through a symbolic link.

A file or folder is written under a temporary name beside its target and renamed when it is complete; a folder to delete is
renamed first. A killed process leaves only names that begin with `TEMPORARY_PREFIXES` or `OLD_PREFIX`, which
`remove_leftovers` deletes. No module outside `storage` creates temporary names or calls `os.rename` or
`os.fsync` (tests/test_architecture.py).
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
"""Prefixes of names that only a killed process leaves behind."""
OLD_PREFIX = ".old-"
"""Prefix of the name of a folder while it is being replaced."""

MAX_FILES_TO_FLUSH = 64


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_all(folder: Path) -> None:
    """Flush a folder and every file and folder below it."""
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink():
            flush(path)
    flush(folder)


def flush_all_or_sync(folder: Path) -> None:
    """Flush a folder and all below it; with many files by `os.sync`, which reports no errors, since flushing takes 2 ms per file."""
    if sum(1 for _ in folder.rglob("*")) > MAX_FILES_TO_FLUSH:
        os.sync()
    else:
        flush_all(folder)


def open_without_following_links(path: str | Path, flags: int) -> int:
    """Opener for `open` that refuses a symbolic link: writing through it would change a file elsewhere."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def make_temporary_name(path: Path, prefix: str = TEMPORARY_PREFIXES[0]) -> Path:
    """Return an unused hidden name beside `path` with the same suffix, from which libraries infer the format."""
    return path.with_name(f"{prefix}{path.name}-{uuid.uuid4().hex[:8]}{path.suffix}")


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write a file or link to, which then replaces `path`; after an error it is deleted.

    The content is not flushed: after a power failure the file may be empty. `write_atomic` flushes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = make_temporary_name(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: str | bytes) -> None:
    """Replace a file by one that holds `data`, flushed to disk before it is renamed."""
    with replacing_file(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        flush(temporary)


@contextmanager
def hold_lock(path: Path, *, shared: bool = False, wait: bool = True) -> Iterator[bool]:
    """Hold a lock on a file while the context is open; yield whether it was taken, which without `wait` may fail.

    Several processes may hold a shared lock. The kernel releases the lock of a process that dies.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def read_locked(path: Path, offset: int) -> bytes:
    """Return what was appended by `append_locked` after `offset`; a write that is still going on is waited for."""
    with open(path, "rb", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        file.seek(offset)
        return file.read()


def append_locked(path: Path, data: bytes) -> None:
    """Append to a file that several processes write: all of `data` or, on a full disk, nothing; flushed to disk.

    The kernel releases the lock of a killed process, and a line that it has cut off is removed before the next is written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        end = os.lseek(descriptor, 0, os.SEEK_END)
        if end and os.pread(descriptor, 1, end - 1) != b"\n":
            end = os.pread(descriptor, end, 0).rfind(b"\n") + 1
            os.ftruncate(descriptor, end)
        try:
            if os.pwrite(descriptor, data, end) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, end)
            raise
    finally:
        os.close(descriptor)


def move_files(paths: Iterable[Path], folder: Path) -> None:
    """Move files into `folder`, on the same file system, keeping their names."""
    for path in paths:
        os.rename(path, folder / path.name)
    flush(folder)


def rename_aside(folder: Path) -> Path:
    """Rename a folder to the first free name among FOLDER.1, FOLDER.2, ..., and return it."""
    number = 1
    while (new_name := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    os.rename(folder, new_name)
    return new_name


def delete_folder(folder: Path) -> None:
    """Delete a folder; it is renamed first, so that a half-deleted folder is never taken for a complete one."""
    trash = make_temporary_name(folder, ".trash-")
    os.rename(folder, trash)
    shutil.rmtree(trash, ignore_errors=True)


def replace_folder(new: Path, target: Path) -> None:
    """Replace the folder `target` by the folder `new` atomically, and delete the old one.

    If the file system cannot exchange two names, the old folder is renamed for a moment; `remove_leftovers` restores it
    after a crash.
    """
    if not os.path.lexists(target):
        os.rename(new, target)
        flush(target.parent)
        return
    if _exchange(new, target):
        old = new
    else:
        old = make_temporary_name(target, OLD_PREFIX)
        os.rename(target, old)
        try:
            os.rename(new, target)
        except OSError:
            os.rename(old, target)
            raise
    flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names atomically (Linux); return False if that is not supported."""
    at_cwd, exchange = -100, 2
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0:
        return True
    error_number = ctypes.get_errno()
    if error_number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(error_number, os.strerror(error_number), str(second))


@contextmanager
def scratch_folder(path: Path, *, mode: int = 0o777) -> Iterator[Path]:
    """Yield an empty folder with a temporary name next to `path`; it is deleted at the end, unless it was renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = make_temporary_name(path)
    try:
        temporary.mkdir(mode=mode)
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            _try_lock(descriptor)  # so that no other process takes it for a leftover while this one lives
            yield temporary
        finally:
            os.close(descriptor)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def writing_folder(target: Path, *, replace: bool = True, mode: int = 0o777) -> Iterator[Path]:
    """Yield a temporary folder to fill, which then replaces `target`; after an error, or if left empty, it is deleted.

    With `replace=False`, FileExistsError is raised if `target` exists and is not empty.
    """
    with scratch_folder(target, mode=mode) as temporary:
        yield temporary
        if not any(temporary.iterdir()):
            return
        flush_all(temporary)
        if replace:
            replace_folder(temporary, target)
        else:
            _rename_to_free(temporary, target)


@contextmanager
def resumable_folder(target: Path) -> Iterator[Path]:
    """Like `writing_folder`, for long work: the partial result of a killed or interrupted process is passed to the next.

    The caller holds a lock on `target`, and `target` does not exist.
    """
    temporary = target.with_name(f"{target.name}.tmp")
    temporary.mkdir(exist_ok=True)
    try:
        yield temporary
        flush_all(temporary)
        _rename_to_free(temporary, target)
    except KeyboardInterrupt:
        raise  # the partial result stays for the next time
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _rename_to_free(new: Path, target: Path) -> None:
    """Rename a folder to `target`, which must not exist or be an empty folder."""
    try:
        os.rename(new, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        raise
    flush(target.parent)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Delete files that a killed process left half-written, and restore folders that it was replacing.

    With `name`, only the leftovers of the file or folder of that name are deleted or restored. Folders that another process
    is writing are not touched.
    """
    for path in [folder / entry for entry in os.listdir(folder)]:
        original = _parse_original_name(path.name)
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


def _parse_original_name(name: str) -> str | None:
    """Return the name of the file or folder that a temporary name stands for, or None for other names."""
    match = re.fullmatch(r"\.[a-z]+-(.+)-[0-9a-f]{8}(\.[^.]*)?", name)
    return match[1] if match else None


def _try_lock(descriptor: int) -> bool:
    """Try to lock; return whether the lock is held now. On a file system without locks, return True."""
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
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a run.

    The owner's pid is checked first, because trying the lock could disturb a run that is just starting.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        owner = json.loads(os.pread(handle, 4096, 0) or b"{}")
        is_on_this_host = owner.get("host") == socket.gethostname()
        if is_on_this_host and not psutil.pid_exists(int(owner.get("pid", 0))):
            return False
    except (ValueError, TypeError, AttributeError, RecursionError):
        pass  # a process is writing the lock file now
    except OSError:  # not a file
        os.close(handle)
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False
