"""Facts that a run keeps beside its weights, written and read back whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bottega.core.errors import CheckpointError, DataError
from bottega.storage.durable import writing_folder

T = TypeVar("T")


class MetadataMissing(CheckpointError):
    """A file of a run's codec is not there, or not whole. The same training writes it again."""


def read_metadata(path: Path, parse: Callable[[bytes], T]) -> T:
    """`parse` raises a ValueError, as pydantic and json do, or a TypeError for what is none of ours."""
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError, TypeError):
        raise MetadataMissing(f"{path} cannot be read; start the same training again to have it written") from None


def write_metadata_once(
    path: Path, text: str, *, parse: Callable[[bytes], T], is_same: Callable[[T], bool], mismatch: str
) -> None:
    """Write `text` as the one file of its folder, unless it is there; what is there must be the same, or `otherwise` is said."""
    try:
        before = read_metadata(path, parse)
    except MetadataMissing:
        pass  # it is written again
    else:
        if not is_same(before):
            raise DataError(mismatch)
        return
    with writing_folder(path.parent) as temporary:
        (temporary / path.name).write_text(text)
