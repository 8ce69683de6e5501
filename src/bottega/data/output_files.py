"""Files for people to look at or listen to: numbered in a folder, of a known kind, and said with a remedy where they cannot be written."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.core.saver import explain_os_error

CONTACT_SHEET_NAMES = ("sheet.png", "spectrograms.png")
SUFFIXES = (".png", ".wav", ".mp4", ".gif")
"""Of single files in a folder, and what lies beside them."""

NO_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def replace_non_finite(value: Any) -> Any:
    """JSON has no infinity and no NaN; null is what a reader can tell from a number."""
    if isinstance(value, dict):
        return {key: replace_non_finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [replace_non_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_folder(path: Path) -> bool:
    """A name without an ending is a folder, and so is whatever already is one."""
    return not path.suffix or path.is_dir()


def require_suffix(path: Path, allowed: Collection[str]) -> str:
    """The ending in small letters, one of `known`."""
    suffix = path.suffix.lower()
    if suffix not in allowed:
        raise UsageError(f"{path}: cannot write {suffix or 'a file without an ending'}; use {', '.join(allowed)}")
    return suffix


def build_numbered_paths(folder: Path, count: int, suffix: str) -> list[Path]:
    """00, 01, ...: as many digits as it takes for the files to be listed in order."""
    digits = max(2, len(str(count - 1)))
    return [folder / f"{number:0{digits}d}{suffix}" for number in range(count)]


def replace_previous_files(path: Path, write: Callable[[], list[Path]]) -> list[Path]:
    """The files that `write` puts into a folder, without those that an earlier call has left there."""
    before = _numbered_before(path) if path.is_dir() else []
    files = write()
    for old in set(before) - set(files):  # after the new ones are there, and of more samples than they are
        old.unlink()
    return files


def _numbered_before(folder: Path) -> list[Path]:
    """What lies beside a sheet of ours and is numbered as ours are, without a gap and with as few digits; anything else
    is somebody's own."""
    names = {path.name for path in folder.iterdir()}
    if names.isdisjoint(CONTACT_SHEET_NAMES):
        return []
    found: list[Path] = []
    for suffix in SUFFIXES:
        count = sum(re.fullmatch(rf"\d{{2,}}{re.escape(suffix)}", name) is not None for name in names)
        ours = build_numbered_paths(folder, count, suffix)
        found += ours if all(path.name in names for path in ours) else []
    return found


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """What cannot be written there is said with its place and the way out; the libraries that write name neither."""
    try:
        yield
    except OSError as error:
        named = os.fsdecode(error.filename) if error.filename is not None else ""
        # Reading goes wrong too, and then another file is named than ours, its temporary sibling or its parents.
        if named and path.name not in named and Path(named).resolve() not in path.resolve().parents:
            raise
        raise _with_remedy(error, path) from None
    except Exception as error:
        # Those of safetensors are no OSError, and say what the system said.
        number = next((n for n in NO_SPACE_ERRORS if os.strerror(n) in str(error)), None)
        if number is None:
            raise
        raise _with_remedy(OSError(number, os.strerror(number)), path) from None


def _with_remedy(error: OSError, path: Path) -> EnvironmentProblem:
    room = "make room there, or " if error.errno in NO_SPACE_ERRORS else ""
    return EnvironmentProblem(f"{explain_os_error(error, path)}; {room}choose another place")
