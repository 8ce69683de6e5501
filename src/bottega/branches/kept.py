"""Facts that a run keeps beside its weights, read back whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from bottega.core.errors import CheckpointError

T = TypeVar("T")


class NotKept(CheckpointError):
    """A file of a run's codec is not there, or not whole. The same training writes it again."""


def read_kept(path: Path, parse: Callable[[bytes], T]) -> T:
    """`parse` raises a ValueError, as pydantic and json do, or a TypeError for what is none of ours."""
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError, TypeError):
        raise NotKept(f"{path} cannot be read; start the same training again to have it written") from None
