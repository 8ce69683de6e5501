"""A content-addressed cache on disk: each entry is a folder named by the hash of its inputs, built once by one process.

An entry is built in a temporary sibling and renamed, so partial entries are never visible. Its MANIFEST.json holds size,
time and SHA-256 of every file; an entry that no longer matches is rebuilt. The leftovers of a killed process are passed
to the next builder, which may continue from there, since the same key means the same inputs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bottega.core.errors import DataError, EnvironmentProblem
from bottega.storage.cache_folder import default_cache
from bottega.storage.durable import resumable_folder

MANIFEST = "MANIFEST.json"


def open_database(name: str, table: str, *, timeout: float) -> sqlite3.Connection:
    """Open an SQLite file of the cache folder that many processes may write to.

    `table` is the CREATE TABLE IF NOT EXISTS statement. Raises OSError and sqlite3.Error.
    """
    folder = default_cache()
    folder.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(folder / name, timeout=timeout)
    try:
        connection.execute(table)
    except BaseException:
        connection.close()
        raise
    return connection


def get_or_build(cache: Path, key: str, build: Callable[[Path], None]) -> Path:
    """Return the entry `key`, built by `build(folder)` if it is missing or damaged. Other processes wait meanwhile."""
    entry = cache / key
    try:
        if is_intact(entry):
            return entry
        cache.mkdir(parents=True, exist_ok=True)
        with _hold_lock(cache / f"{key}.lock"):
            if not is_intact(entry):
                _build_entry(entry, build)
    except OSError as error:
        if error.filename is not None and not Path(os.fsdecode(error.filename)).is_relative_to(cache):
            raise DataError(f"cannot read {os.fsdecode(error.filename)}: {error.strerror}") from error
        raise EnvironmentProblem(
            f"cannot write prepared data to {cache}: {error.strerror or error}; free some space, or set "
            "XDG_CACHE_HOME to a writable folder"
        ) from error
    return entry


@contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    # The kernel releases the lock when its holder dies, so no lock is ever stale.
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build_entry(entry: Path, build: Callable[[Path], None]) -> None:
    """Build an entry; the caller holds the lock, so a file or folder of this name was left by a process that died."""
    if entry.is_dir():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)
    with resumable_folder(entry) as temporary:
        build(temporary)
        write_manifest(temporary)


def write_manifest(folder: Path) -> None:
    """Write MANIFEST.json of a folder; the caller flushes it to disk with the rest."""
    files = {path.relative_to(folder).as_posix(): path for path in _list_files(folder) if path.name != MANIFEST}
    rows = {name: {**_read_size_and_time(path), "sha256": _hash_file(path)} for name, path in files.items()}
    (folder / MANIFEST).write_text(json.dumps(rows, indent=1))


def is_intact(folder: Path) -> bool:
    """Return whether a folder matches its manifest."""
    return find_damage(folder) is None


def find_damage(folder: Path) -> str | None:
    """Return how a folder differs from its manifest, or None. Files of the same size and time are not read.

    (A copy without the original times, as on another machine, is read in full at every start.)
    """
    try:
        rows = json.loads((folder / MANIFEST).read_bytes())
        files = {path.relative_to(folder).as_posix(): path for path in _list_files(folder) if path.name != MANIFEST}
        for name in sorted(rows.keys() ^ files.keys()):
            return f"{name} is missing" if name in rows else f"{name} does not belong there"
        return next(
            (f"{name} has changed" for name, path in files.items() if not _is_unchanged(path, rows[name])), None
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return f"its {MANIFEST} cannot be read"


def _is_unchanged(path: Path, row: dict[str, Any]) -> bool:
    current = _read_size_and_time(path)
    if current["bytes"] != row["bytes"]:
        return False
    return current["time"] == row["time"] or _hash_file(path) == row["sha256"]


def _read_size_and_time(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"bytes": status.st_size, "time": status.st_mtime_ns}


def _list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _hash_file(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
