"""One row of the user's data as a reader yields it: key, location and fields, or why it cannot be read."""

from __future__ import annotations

from typing import Any, NamedTuple


class Record(NamedTuple):
    """One row as a reader yields it."""

    key: str
    """Unique name within its source, independent of where the files are: b.jsonl:3, cats/1.jpg, a.tar:0001."""
    where: str
    """Location for messages: /data/b.jsonl, line 3."""
    fields: dict[str, Any]
    """Text, numbers, lists, arrays. A medium is its encoded bytes or the Path of its file."""


class BadRecord(NamedTuple):
    """A record that cannot be read. The caller decides whether to skip it or to stop."""

    key: str
    where: str
    """Location with the line, the member or the record number."""
    reason: str
    is_unsafe: bool = False
    """Possibly malicious: a name that leads out of the archive, a link, a pickle. Always an error, never skipped."""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class Unreadable(Exception):
    """The content of a record is damaged, too large or of another type. The message is one line that says why."""


class UnsafeContent(Unreadable):
    """The content could run code or escape its archive."""


ENCODING_HINT = "set data.train.encoding, such as latin-1 or utf-16, or convert it with iconv"
"""Remedy for files that are not UTF-8."""


def is_utf16(raw: bytes) -> bool:
    """Return whether bytes begin with a byte order mark of UTF-16."""
    return raw.startswith((b"\xff\xfe", b"\xfe\xff"))
