"""A folder of prepared things, each under the hash of what it was made from: made once, whole, by one process.

An entry is built in a temporary sibling and renamed, so half of one is never seen. Its MANIFEST.json holds the SHA-256
of every file; an entry that no longer matches is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bottega.core.errors import EnvironmentProblem

MANIFEST = "MANIFEST.json"


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bottega"


def cached(cache: Path, key: str, build: Callable[[Path], None]) -> Path:
    """The entry `key`, made by `build(folder)` where it is missing or damaged. Processes that come second wait."""
    entry = cache / key
    try:
        if _is_whole(entry):
            return entry
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{key}.lock"):
            if not _is_whole(entry):
                _make(entry, build)
    except OSError as error:
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
    temporary = entry.with_name(f"{entry.name}.tmp")
    for left in (temporary, entry):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink(missing_ok=True)
    temporary.mkdir()
    try:
        build(temporary)
        (temporary / MANIFEST).write_text(json.dumps(_hashes(temporary), indent=2))
        for file in (*_files(temporary), temporary):
            _flush(file)
        temporary.rename(entry)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _is_whole(entry: Path) -> bool:
    try:
        return json.loads((entry / MANIFEST).read_bytes()) == _hashes(entry)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _hashes(folder: Path) -> dict[str, str]:
    hashes = {}
    for path in _files(folder):
        if path.name != MANIFEST:
            with path.open("rb") as stream:
                hashes[path.relative_to(folder).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
