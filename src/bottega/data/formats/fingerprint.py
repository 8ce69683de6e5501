"""The hash of a file's content, remembered by its size and times, so that a large corpus is not hashed at every start."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from bottega.core.errors import DataError
from bottega.data.formats.compression import open_binary
from bottega.data.tables.cache import open_database

# Git's rule: a file changed so recently may change again within the resolution of its times, which is up to two
# seconds on the coarsest file systems, and would then look the same.
RACY_NS = 2_000_000_000
THREADS = 4

_QUERIED = 500
"""Paths that are asked for at once; SQLite takes 999 in its oldest form."""
_TABLE = "CREATE TABLE IF NOT EXISTS hashes (path TEXT PRIMARY KEY, state TEXT, hash TEXT) WITHOUT ROWID"


class State(NamedTuple):
    """What differs where the content does. The time of change cannot be set by `touch`, that of writing can."""

    size: int
    written: int
    changed: int
    inode: int

    def is_stable(self, now: int) -> bool:
        return max(self.written, self.changed) + RACY_NS <= now


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    return hash_files([path])[0]


def hash_files(paths: Sequence[Path], progress: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
    """SHA-256 of each file, in hex. Several are hashed at once: hashlib lets go of the interpreter.

    `progress` is called with the bytes that are hashed and those that have to be.
    """
    now = time.time_ns()
    names = [os.path.abspath(path) for path in paths]
    states = {name: _state(Path(name)) for name in names}
    known = _remembered(states)
    missing = [name for name in states if name not in known]
    made: dict[str, str] = {}
    done, total = 0, sum(states[name].size for name in missing)
    with ThreadPoolExecutor(THREADS) as pool:
        for name, hashed in zip(missing, pool.map(_hashed, missing), strict=True):
            made[name] = hashed
            done += states[name].size
            progress(done, total)
    # A file that changed while it was read has another time of change by now, and is not taken for this one again.
    settled = (name for name in missing if states[name].is_stable(now))
    _remember((name, str(states[name]), made[name]) for name in settled)
    hashes = known | made
    return [hashes[name] for name in names]


def _hashed(name: str) -> str:
    with open_binary(Path(name)) as stream:
        try:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{name} cannot be read: {error.strerror}") from error


def _state(path: Path) -> State:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    return State(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _remembered(states: dict[str, State]) -> dict[str, str]:
    known = {}
    try:
        with closing(_database()) as kept:
            names = list(states)
            for first in range(0, len(names), _QUERIED):
                some = names[first : first + _QUERIED]
                marks = ", ".join("?" * len(some))
                for name, state, hashed in kept.execute(f"SELECT * FROM hashes WHERE path IN ({marks})", some):
                    if state == str(states[name]):
                        known[name] = hashed
    except (sqlite3.Error, OSError, UnicodeError):
        return {}  # what cannot be remembered is hashed again
    return known


def _remember(rows: Iterable[tuple[str, str, str]]) -> None:
    try:
        with closing(_database()) as kept, kept:
            kept.executemany("INSERT OR REPLACE INTO hashes VALUES (?, ?, ?)", rows)
    except (sqlite3.Error, OSError, UnicodeError):
        return


def _database() -> sqlite3.Connection:
    return open_database("hashes.sqlite", _TABLE, timeout=5)
