"""A folder of prepared things, each under the hash of what it was made from: made once, whole, by one process.

An entry is built in a temporary sibling and renamed, so half of one is never seen. Its MANIFEST.json holds the size,
the time and the SHA-256 of every file; an entry that no longer matches is made again. What a killed process left of an
entry is given to the next builder, who may go on from there: the name says that it was made from the same things.
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
from bottega.storage.durable import resumable_folder

MANIFEST = "MANIFEST.json"


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bottega"


def open_database(name: str, table: str, *, timeout: float) -> sqlite3.Connection:
    """A file of rows that many processes add to; `table` is the statement that makes it where it is missing. Raises OSError
    and sqlite3.Error."""
    folder = default_cache()
    folder.mkdir(parents=True, exist_ok=True)
    opened = sqlite3.connect(folder / name, timeout=timeout)
    try:
        opened.execute(table)
    except BaseException:
        opened.close()
        raise
    return opened


def get_or_build(cache: Path, key: str, build: Callable[[Path], None]) -> Path:
    """The entry `key`, made by `build(folder)` where it is missing or damaged. Processes that come second wait."""
    entry = cache / key
    try:
        if is_intact(entry):
            return entry
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{key}.lock"):
            if not is_intact(entry):
                _make(entry, build)
    except OSError as error:
        if error.filename is not None and not Path(os.fsdecode(error.filename)).is_relative_to(cache):
            raise DataError(f"{os.fsdecode(error.filename)} cannot be read: {error.strerror}") from error
        raise EnvironmentProblem(
            f"prepared data cannot be kept in {cache}: {error.strerror or error}; free some space, or set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return entry


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The kernel lets go of the lock when its holder dies, so no lock is ever stale.
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(entry: Path, build: Callable[[Path], None]) -> None:
    """Under the lock: whatever else is there under this name was left by a process that died."""
    if entry.is_dir():
        shutil.rmtree(entry)
    else:
        entry.unlink(missing_ok=True)
    with resumable_folder(entry) as temporary:
        build(temporary)
        write_manifest(temporary)


def write_manifest(folder: Path) -> None:
    """Write down what the folder holds; who publishes it flushes that too."""
    files = {path.relative_to(folder).as_posix(): path for path in _files(folder) if path.name != MANIFEST}
    rows = {name: {**_seen(path), "sha256": _sha256(path)} for name, path in files.items()}
    (folder / MANIFEST).write_text(json.dumps(rows, indent=1))


def is_intact(folder: Path) -> bool:
    return find_damage(folder) is None


def find_damage(folder: Path) -> str | None:
    """What changed in the folder since it was sealed; None is nothing. A file of the same size and time is not read.

    (A copy that lost its times, as on another machine, is read in full at every start.)
    """
    try:
        rows = json.loads((folder / MANIFEST).read_bytes())
        files = {path.relative_to(folder).as_posix(): path for path in _files(folder) if path.name != MANIFEST}
        for name in sorted(rows.keys() ^ files.keys()):
            return f"{name} is missing" if name in rows else f"{name} does not belong there"
        return next((f"{name} has changed" for name, path in files.items() if not _matches(path, rows[name])), None)
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return f"its {MANIFEST} cannot be read"


def _matches(path: Path, row: dict[str, Any]) -> bool:
    seen = _seen(path)
    if seen["bytes"] != row["bytes"]:
        return False
    return seen["time"] == row["time"] or _sha256(path) == row["sha256"]


def _seen(path: Path) -> dict[str, int]:
    status = path.stat()
    return {"bytes": status.st_size, "time": status.st_mtime_ns}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
