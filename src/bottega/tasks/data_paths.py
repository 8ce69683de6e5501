"""Relative paths in the recipe of a finished run, resolved against the folder in which its training was started."""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import TypeVar

from bottega.config.section import Section
from bottega.core.errors import DataError

S = TypeVar("S", bound=Section)

START_FOLDER = "folder"
"""Key in environment.json of a run: the working directory of its training."""
START_FOLDER_FROM_RUN = "folder_from_run"
"""Key of the same folder relative to the run directory: both may have moved together."""
PATH_KEYS = ("path", "more_paths", "metadata", "teacher", "start")
"""Recipe keys that hold file paths."""


class DataMissing(DataError):
    """A run's own data was removed, or has changed since training."""


def read_start_folders(path: Path) -> tuple[Path, ...]:
    """Return the folders in which a run may have been started, most likely first; `path` is the run directory or lies inside it."""
    run = next((folder for folder in (path, *path.parents) if (folder / "environment.json").is_file()), None)
    if run is None:
        return ()
    try:
        metadata = json.loads((run / "environment.json").read_bytes())
        names = [metadata.get(START_FOLDER), metadata.get(START_FOLDER_FROM_RUN)]
    except (OSError, ValueError, AttributeError):
        return ()
    return tuple(dict.fromkeys((run.absolute() / name).resolve() for name in names if isinstance(name, str)))


def resolve_paths(section: S, folders: tuple[Path, ...]) -> S:
    """Return a recipe section with relative paths made absolute; a path that exists in none of `folders` is unchanged."""
    changes = {name: _resolve_value(name, getattr(section, name), folders) for name in type(section).model_fields}
    return section.model_copy(update=changes)


def _resolve_value(name: str, value: object, folders: tuple[Path, ...]) -> object:
    if isinstance(value, Section):
        return resolve_paths(value, folders)
    if isinstance(value, tuple):
        return tuple(_resolve_value(name, item, folders) for item in value)
    if name not in PATH_KEYS or not isinstance(value, str):
        return value
    return next((str(folder / value) for folder in folders if _exists(folder / value)), value)


def _exists(path: Path) -> bool:
    return path.exists() or (
        glob.has_magic(str(path)) and next(glob.iglob(str(path), recursive=True), None) is not None
    )
