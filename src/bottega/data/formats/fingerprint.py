"""SHA-256 of file contents, cached by size and times, so that a large corpus is not hashed at every start."""

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

# As in git: a file changed within the resolution of its times (up to two seconds) may change again and look the same.
RACY_NS = 2_000_000_000
THREADS = 4

_QUERY_PATHS = 500
"""Paths per query; old versions of SQLite take at most 999 parameters."""
_TABLE = "CREATE TABLE IF NOT EXISTS hashes (path TEXT PRIMARY KEY, state TEXT, hash TEXT) WITHOUT ROWID"


class State(NamedTuple):
    """Size, mtime, ctime and inode of a file: another content has another state. `touch` cannot set the ctime."""

    size: int
    written: int
    changed: int
    inode: int

    def is_stable(self, now: int) -> bool:
        """Return whether the last change is old enough for a later one to show in the times."""
        return max(self.written, self.changed) + RACY_NS <= now


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    return hash_files([path])[0]


def hash_files(paths: Sequence[Path], progress: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
    """Return the SHA-256 of each file, in hex. Threads hash several at once, since hashlib releases the GIL.

    `progress` is called with the bytes hashed so far and in all.
    """
    now = time.time_ns()
    names = [os.path.abspath(path) for path in paths]
    states = {name: _state(Path(name)) for name in names}
    cached = _load_cached(states)
    missing = [name for name in states if name not in cached]
    computed: dict[str, str] = {}
    done, total = 0, sum(states[name].size for name in missing)
    with ThreadPoolExecutor(THREADS) as pool:
        for name, hashed in zip(missing, pool.map(_hash_uncached, missing), strict=True):
            computed[name] = hashed
            done += states[name].size
            progress(done, total)
    # The state was taken before reading: a file that changed meanwhile has another ctime now and is hashed again.
    stable = (name for name in missing if states[name].is_stable(now))
    _store((name, str(states[name]), computed[name]) for name in stable)
    hashes = cached | computed
    return [hashes[name] for name in names]


def _hash_uncached(name: str) -> str:
    with open_binary(Path(name)) as stream:
        try:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"cannot read {name}: {error.strerror}") from error


def _state(path: Path) -> State:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return State(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _load_cached(states: dict[str, State]) -> dict[str, str]:
    cached = {}
    try:
        with closing(_database()) as database:
            names = list(states)
            for first in range(0, len(names), _QUERY_PATHS):
                batch = names[first : first + _QUERY_PATHS]
                marks = ", ".join("?" * len(batch))
                for name, state, hashed in database.execute(f"SELECT * FROM hashes WHERE path IN ({marks})", batch):
                    if state == str(states[name]):
                        cached[name] = hashed
    except (sqlite3.Error, OSError, UnicodeError):
        return {}  # without the cache all files are hashed again
    return cached


def _store(rows: Iterable[tuple[str, str, str]]) -> None:
    try:
        with closing(_database()) as database, database:
            database.executemany("INSERT OR REPLACE INTO hashes VALUES (?, ?, ?)", rows)
    except (sqlite3.Error, OSError, UnicodeError):
        return


def _database() -> sqlite3.Connection:
    return open_database("hashes.sqlite", _TABLE, timeout=5)
