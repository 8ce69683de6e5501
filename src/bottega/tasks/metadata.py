"""Metadata files that a run saves beside its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bottega.core.errors import CheckpointError

T = TypeVar("T")


class MetadataUnreadable(CheckpointError):
    """A file of a run's processor is missing or damaged; resuming the training writes it again."""


def read_metadata(path: Path, parse: Callable[[bytes], T]) -> T:
    """Return a metadata file as parsed by `parse`, whose ValueError or TypeError becomes MetadataUnreadable."""
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError, TypeError):
        raise MetadataUnreadable(f"cannot read {path}; run the training command again to rewrite it") from None
