"""Where the relative paths of a finished run's recipe lead: from the folder that its training was started in."""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import TypeVar

from bottega.config.section import Section
from bottega.core.errors import DataError

S = TypeVar("S", bound=Section)

START_FOLDER = "folder"
"""In environment.json of a run: the working directory of its training."""
START_FOLDER_FROM_RUN = "folder_from_run"
"""The same, relative to the run directory: both may have moved together."""
PATH_KEYS = ("path", "more_paths", "metadata", "teacher", "start")
"""Keys of a recipe that name files."""


class DataMissing(DataError):
    """A run's own data is not there any more, or is not what the run learnt from."""


def read_start_folders(start: Path) -> tuple[Path, ...]:
    """The folders that a run may have been started in, the likeliest first, from a folder inside its run directory."""
    run = next((folder for folder in (start, *start.parents) if (folder / "environment.json").is_file()), None)
    if run is None:
        return ()
    try:
        metadata = json.loads((run / "environment.json").read_bytes())
        named = [metadata.get(START_FOLDER), metadata.get(START_FOLDER_FROM_RUN)]
    except (OSError, ValueError, AttributeError):
        return ()
    return tuple(dict.fromkeys((run.absolute() / name).resolve() for name in named if isinstance(name, str)))


def resolve_paths(block: S, folders: tuple[Path, ...]) -> S:
    """A section of a recipe with its relative paths as absolute ones. Names that are no files here stay as they are."""
    changes = {name: _located(name, getattr(block, name), folders) for name in type(block).model_fields}
    return block.model_copy(update=changes)


def _located(name: str, value: object, folders: tuple[Path, ...]) -> object:
    if isinstance(value, Section):
        return resolve_paths(value, folders)
    if isinstance(value, tuple):
        return tuple(_located(name, item, folders) for item in value)
    if name not in PATH_KEYS or not isinstance(value, str):
        return value
    return next((str(folder / value) for folder in folders if _is_there(folder / value)), value)


def _is_there(path: Path) -> bool:
    return path.exists() or (
        glob.has_magic(str(path)) and next(glob.iglob(str(path), recursive=True), None) is not None
    )
