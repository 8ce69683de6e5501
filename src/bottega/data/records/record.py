"""One row of a person's data on its way in: its name, its place and its fields, or why it cannot be read."""

from __future__ import annotations

from typing import Any, NamedTuple


class Record(NamedTuple):
    """What a reader gives."""

    key: str
    """Its name among all records of its source, wherever the files lie: b.jsonl:3, cats/1.jpg, a.tar:0001."""
    where: str
    """For people: /data/b.jsonl, line 3."""
    fields: dict[str, Any]
    """Text, numbers, lists, arrays. A medium is its encoded bytes, or the Path of its file."""


class BadRecord(NamedTuple):
    """What a reader gives in place of a record it cannot read. Whether that ends the reading is not its decision."""

    key: str
    where: str
    """With the physical line, the member or the record number."""
    reason: str
    is_unsafe: bool = False
    """Made to do harm, or as if: a name that leads out of the archive, a link, a pickle. Never merely skipped."""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class Unreadable(Exception):
    """What a decoder raises: the content of a record is damaged, too large or of another kind. One line, why."""


class UnsafeContent(Unreadable):
    """The content could do harm where somebody trusted it."""


ENCODING_HINT = "set data.train.encoding, such as latin-1 or utf-16, or convert it with iconv"
"""What to do with bytes that are not UTF-8."""


def is_utf16(raw: bytes) -> bool:
    """By the mark that such a file begins with; its letters are full of NUL bytes otherwise."""
    return raw.startswith((b"\xff\xfe", b"\xfe\xff"))
