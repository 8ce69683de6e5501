"""How one kind of data is read: what marks its files, how they are cut for several processes, and the records in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bottega.config.data import Source
from bottega.data.records.record import BadRecord, Record

# A file may have any bytes for a name. Python keeps those that are no UTF-8 as lone surrogates, which nothing can encode.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def make_printable(name: str) -> str:
    """A name in characters that can be shown on a line and encoded: b"caf\\xe9" is caf\\udce9."""
    return _UNPRINTABLE.sub(lambda found: ascii(found.group())[1:-1], name)


class Piece(NamedTuple):
    """What one process reads in one go. Pieces are in order, and together they are all records exactly once."""

    file: Path
    name: str
    """The file relative to the root of its source; record keys begin with it."""
    start: int = 0
    stop: int | None = None
    """A range of the file, in bytes or rows as the format counts; None is its end."""
    line: int = 0
    """Lines before `start`, so that a bad one is named by its number in the file."""

    @property
    def location(self) -> str:
        """The file, for people; `where` of its records begins with it."""
        return make_printable(str(self.file))


def whole_file(file: Path, name: str, source: Source, size: int) -> list[Piece]:
    """For files that can only be read from their beginning."""
    return [Piece(file, name)]


@dataclass(frozen=True)
class Format:
    """One kind. `read` yields records and bad ones in file order, in little memory, and never runs anything it reads."""

    kind: str
    suffixes: frozenset[str]
    """Lower case with the dot, compression included: .jsonl, .jsonl.gz."""
    read: Callable[[Piece, Source], Iterator[Record | BadRecord]]
    list_pieces: Callable[[Path, str, Source, int], list[Piece]] = whole_file
    """(file, name, source, size): pieces of about `size` bytes."""
    is_media: bool = False
    """Bad records are skipped by default, up to data.max_bad."""
