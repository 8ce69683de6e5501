"""Frozen models that a run is built on: known by a hash of what they hold, since the run understands no other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

from bottega.core.errors import BottegaError, CheckpointError
from bottega.data.readers.fingerprint import content_hashes

SETTINGS = ("config.json", "mel.json")


def content_of(folder: Path) -> str:
    """A hash of all that decides what the model of a folder computes."""
    settings = [folder / name for name in SETTINGS if name == SETTINGS[0] or (folder / name).is_file()]
    files = [*settings, *sorted(folder.glob("*.safetensors"))]
    named = [(file.name, found) for file, found in zip(files, content_hashes(files), strict=True)]
    return hashlib.sha256(repr(named).encode()).hexdigest()


def check_same(what: str, *, now: str | None, before: str | None, named: str, was: str) -> None:
    """A run goes on with the model it began with, or not at all."""
    if now != before:
        raise CheckpointError(
            f"{named}: is another {what} than this run began with ({was}); put that one back, or start over with --fresh"
        )


def found_again(what: str, content: str | None, places: Iterable[Callable[[], Path]]) -> Path:
    """The first of the places with this content; another model is an error only where no place has the right one."""
    other: Path | None = None
    problem: BottegaError | None = None
    for place in places:
        try:
            folder = place()
            found = content_of(folder)
        except BottegaError as error:
            problem = problem or error
            continue
        if found == content:
            return folder
        other = other or folder
    if other is not None:
        raise CheckpointError(f"{other}: is another {what} than this run was trained with; put that one back")
    raise CheckpointError(f"the {what} of this run is gone: {problem}; put it back") from problem
