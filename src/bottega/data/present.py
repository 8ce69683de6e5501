"""Files for people to look at or listen to: numbered in a folder, of a known kind, and whole or not there at all."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from bottega.core.errors import UsageError


def is_folder(path: Path) -> bool:
    """A name without an ending is a folder, and so is whatever already is one."""
    return not path.suffix or path.is_dir()


def ending(path: Path, known: Collection[str]) -> str:
    """The ending in small letters, one of `known`."""
    suffix = path.suffix.lower()
    if suffix not in known:
        raise UsageError(f"{path}: cannot write {suffix or 'a file without an ending'}; use {', '.join(known)}")
    return suffix


def numbered(folder: Path, count: int, suffix: str) -> list[Path]:
    """00, 01, ...: as many digits as it takes for the files to be listed in order."""
    digits = max(2, len(str(count - 1)))
    return [folder / f"{number:0{digits}d}{suffix}" for number in range(count)]


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A sibling to write to, which takes its place at the end; after an error neither it nor a half file is left.

    It has the same ending, since libraries go by that.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
