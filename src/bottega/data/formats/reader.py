"""The interface of a file format: the suffixes of its files, how they are cut into pieces, and the records of a piece."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bottega.config.data import Source
from bottega.data.records.record import BadRecord, Record

# A file name may hold any bytes. Python keeps those that are not UTF-8 as lone surrogates, which cannot be encoded.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def make_printable(name: str) -> str:
    """Return `name` with control characters and lone surrogates escaped: b"caf\\xe9" becomes caf\\udce9."""
    return _UNPRINTABLE.sub(lambda match: ascii(match.group())[1:-1], name)


class Piece(NamedTuple):
    """A range of one file that a process reads at once. The pieces of a source, in order, cover each record exactly once."""

    file: Path
    name: str
    """Path of the file relative to the root of its source; the prefix of its record keys."""
    start: int = 0
    stop: int | None = None
    """`start` and `stop` count bytes, rows or groups, depending on the format; None is the end of the file."""
    records_before: int = 0
    """Number of records before `start` (of JSON Lines: of lines, empty ones too), for positions in the whole file in messages."""

    @property
    def location(self) -> str:
        """Printable path of the file; the beginning of `where` of its records."""
        return make_printable(str(self.file))


def list_single_piece(file: Path, name: str, source: Source, size: int) -> list[Piece]:
    """Return the file as one piece, for formats that can only be read from the beginning."""
    return [Piece(file, name)]


@dataclass(frozen=True)
class Format:
    """A file format. `read` yields the records of a piece in file order, in bounded memory, and never executes content."""

    kind: str
    suffixes: frozenset[str]
    """In lower case with the dot and any compression: .jsonl, .jsonl.gz."""
    read: Callable[[Piece, Source], Iterator[Record | BadRecord]]
    list_pieces: Callable[[Path, str, Source, int], list[Piece]] = list_single_piece
    """(file, name, source, size) to pieces of about `size` bytes."""
    is_media: bool = False
    """Whether bad records are skipped by default, up to data.max_bad."""
