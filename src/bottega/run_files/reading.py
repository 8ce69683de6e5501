"""Reading files of a run directory: what lies outside of it, behind a link, is left out with a note."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bottega.redaction import redact_values

MAX_BYTES = 64 << 20
"""Size of the largest JSON file that is read."""


def is_part_of(path: Path, run: Path) -> bool:
    """Return whether a file or folder lies inside the run directory, with all links followed."""
    try:
        return path.resolve().is_relative_to(run.resolve())
    except (OSError, RuntimeError):  # a link to itself
        return False


def is_regular_file(path: Path, run: Path) -> bool:
    """Return whether a path is a plain file of the run: not a link elsewhere, and not a pipe, which would block its reader."""
    return path.is_file() and is_part_of(path, run)


def is_readable(path: Path, run: Path, notes: list[str]) -> bool:
    """Return whether a file of a run can be read; if it is there and cannot, `notes` say why."""
    if not is_regular_file(path, run):
        if path.exists() or path.is_symlink():
            notes.append(f"{path.name} is not a file of this run and is left out")
        return False
    try:
        path.open("rb").close()
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")
        return False
    return True


def list_folder(folder: Path, run: Path) -> list[Path]:
    """Return the content of a folder of a run, sorted; nothing of a folder that is missing or outside of the run."""
    try:
        return sorted(folder.iterdir()) if is_part_of(folder, run) else []
    except OSError:
        return []


def read_json_object(path: Path, run: Path, notes: list[str]) -> dict[str, Any]:
    """Return the object in a file of a run without secrets, or {} if there is none; a damaged file is reported in `notes`."""
    try:
        if path.exists() and not is_regular_file(path, run):
            notes.append(f"{path.name} is not a file of this run and is left out")
            return {}
        if path.stat().st_size > MAX_BYTES:
            notes.append(f"{path.name} is larger than {MAX_BYTES >> 20} MiB and is left out")
            return {}
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is damaged"
        notes.append(f"{path.name} cannot be read: {reason}")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} cannot be read: it has no JSON object")
        return {}
    return dict(redact_values(value))
