"""Paths of output files (images, audio, video): suffixes, numbering, replacing earlier files, and write errors."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.core.saver import explain_os_error

CONTACT_SHEET_NAMES = ("sheet.png", "spectrograms.png")
SUFFIXES = (".png", ".wav", ".mp4", ".gif")
"""Suffixes of numbered files."""

NO_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_folder(path: Path) -> bool:
    """Return whether an output path names a folder: it has no suffix, or is a folder already."""
    return not path.suffix or path.is_dir()


def require_suffix(path: Path, allowed: Collection[str]) -> str:
    """Return the suffix of a path in lower case; raise `UsageError` if it is not in `allowed`."""
    suffix = path.suffix.lower()
    if suffix not in allowed:
        raise UsageError(f"{path}: cannot write {suffix or 'a file without a suffix'}; use {', '.join(allowed)}")
    return suffix


def build_numbered_paths(folder: Path, count: int, suffix: str) -> list[Path]:
    """Return the paths 00, 01, ... in a folder, with enough digits to sort them by name."""
    digits = max(2, len(str(count - 1)))
    return [folder / f"{number:0{digits}d}{suffix}" for number in range(count)]


def replace_previous_files(path: Path, write: Callable[[], list[Path]]) -> list[Path]:
    """Call `write`, then remove the files of an earlier call in the folder that it did not replace; return the new files."""
    previous_files = _find_previous_files(path) if path.is_dir() else []
    files = write()
    for stale_file in set(previous_files) - set(files):  # after writing, so that a failure loses nothing
        stale_file.unlink()
    return files


def _find_previous_files(folder: Path) -> list[Path]:
    """Return the files of an earlier call: consecutively numbered, beside a contact sheet. Others may be the user's own."""
    names = {path.name for path in folder.iterdir()}
    if names.isdisjoint(CONTACT_SHEET_NAMES):
        return []
    previous: list[Path] = []
    for suffix in SUFFIXES:
        count = sum(re.fullmatch(rf"\d{{2,}}{re.escape(suffix)}", name) is not None for name in names)
        numbered = build_numbered_paths(folder, count, suffix)
        previous += numbered if all(path.name in names for path in numbered) else []
    return previous


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn errors from writing to `path` into `EnvironmentProblem` with the path and a remedy."""
    try:
        yield
    except OSError as error:
        filename = os.fsdecode(error.filename) if error.filename is not None else ""
        # An error about a file other than the output, its temporary sibling or its parents is not an error of writing.
        if filename and path.name not in filename and Path(filename).resolve() not in path.resolve().parents:
            raise
        raise _add_remedy(error, path) from None
    except Exception as error:
        # safetensors does not raise OSError, but its message contains that of the system.
        error_number = next((n for n in NO_SPACE_ERRORS if os.strerror(n) in str(error)), None)
        if error_number is None:
            raise
        raise _add_remedy(OSError(error_number, os.strerror(error_number)), path) from None


def _add_remedy(error: OSError, path: Path) -> EnvironmentProblem:
    remedy = "free some space, or " if error.errno in NO_SPACE_ERRORS else ""
    return EnvironmentProblem(f"{explain_os_error(error, path)}; {remedy}choose another path")
