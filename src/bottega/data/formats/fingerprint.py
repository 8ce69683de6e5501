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
NUM_THREADS = 4

_MAX_QUERY_PATHS = 500
"""Paths per query; old versions of SQLite take at most 999 parameters."""
_CREATE_TABLE = "CREATE TABLE IF NOT EXISTS hashes (path TEXT PRIMARY KEY, state TEXT, hash TEXT) WITHOUT ROWID"


class State(NamedTuple):
    """Size, mtime, ctime and inode of a file: if the content changes, so does the state. `touch` cannot set the ctime."""

    size: int
    written: int
    changed: int
    inode: int

    def is_stable(self, now: int) -> bool:
        """Return whether the last change is so old that a later change would get another time."""
        return max(self.written, self.changed) + RACY_NS <= now


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    return hash_files([path])[0]


def hash_files(
    paths: Sequence[Path], progress: Callable[[int, int], None] = lambda hashed_bytes, total_bytes: None
) -> list[str]:
    """Return the SHA-256 of each file, in hex. Several files are hashed at once, in threads, since hashlib releases the GIL.

    `progress` is called with the bytes hashed so far and in total.
    """
    now = time.time_ns()
    names = [os.path.abspath(path) for path in paths]
    states = {name: _read_state(Path(name)) for name in names}
    cached_hashes = _load_cached_hashes(states)
    missing_names = [name for name in states if name not in cached_hashes]
    computed_hashes: dict[str, str] = {}
    hashed_bytes, total_bytes = 0, sum(states[name].size for name in missing_names)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for name, file_hash in zip(missing_names, pool.map(_hash_uncached, missing_names), strict=True):
            computed_hashes[name] = file_hash
            hashed_bytes += states[name].size
            progress(hashed_bytes, total_bytes)
    # The state was taken before reading: a file that changed meanwhile has another ctime now and is hashed again.
    stable_names = (name for name in missing_names if states[name].is_stable(now))
    _store_hashes((name, str(states[name]), computed_hashes[name]) for name in stable_names)
    hashes = cached_hashes | computed_hashes
    return [hashes[name] for name in names]


def _hash_uncached(name: str) -> str:
    with open_binary(Path(name)) as stream:
        try:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"cannot read {name}: {error.strerror}") from error


def _read_state(path: Path) -> State:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    return State(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _load_cached_hashes(states: dict[str, State]) -> dict[str, str]:
    cached_hashes = {}
    try:
        with closing(_open_hash_database()) as database:
            names = list(states)
            for start in range(0, len(names), _MAX_QUERY_PATHS):
                batch = names[start : start + _MAX_QUERY_PATHS]
                placeholders = ", ".join("?" * len(batch))
                for name, state, file_hash in database.execute(
                    f"SELECT * FROM hashes WHERE path IN ({placeholders})", batch
                ):
                    if state == str(states[name]):
                        cached_hashes[name] = file_hash
    except (sqlite3.Error, OSError, UnicodeError):
        return {}  # without the cache all files are hashed again
    return cached_hashes


def _store_hashes(rows: Iterable[tuple[str, str, str]]) -> None:
    try:
        with closing(_open_hash_database()) as database, database:
            database.executemany("INSERT OR REPLACE INTO hashes VALUES (?, ?, ?)", rows)
    except (sqlite3.Error, OSError, UnicodeError):
        return


def _open_hash_database() -> sqlite3.Connection:
    return open_database("hashes.sqlite", _CREATE_TABLE, timeout=5)
