"""JSON files that hold one list of objects, or {"data": [...]}: loaded whole and parsed element by element."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NoReturn, final

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats.compression import COMPRESSION_SUFFIXES, open_decompressed
from bottega.data.formats.jsonlines import EXAMPLE_ROW, InvalidRow, check_row, decode, explain_json_error
from bottega.data.formats.reader import Format, Piece
from bottega.data.records.archive_members import read_up_to
from bottega.data.records.record import ENCODING_HINT, BadRecord, Record

MAX_BYTES = 256 << 20
"""Of decompressed text. One rare character makes every character four bytes in memory, and rows are in memory twice."""
_SPACE = re.compile(r"[ \t\r\n]*")
# Finds the end of an element that is JSON but not a valid row, so that reading can go on behind it.
_lenient = json.JSONDecoder().raw_decode


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    """Yield the elements of a JSON array one by one, with line and column as their location."""
    text = _Text(piece)
    for number, start in enumerate(_elements(text), start=1):
        key, line = f"{piece.name}:{number}", text.line(start)
        where = f"{piece.location}, line {line}, column {text.column(start)}"
        try:
            fields, end = decode(text.all, start)
            text.at = end
            check_row(fields, text.all, start, end)
            yield Record(key, where, fields)
        except json.JSONDecodeError as error:
            text.fail(error.pos, error.msg)
        except (ValueError, RecursionError) as error:
            if text.at == start:
                text.skip()
            reason = error if isinstance(error, InvalidRow) else explain_json_error(error, "")
            yield BadRecord(key, where, str(reason))


@final
class _Text:
    """The text of a file and a position in it."""

    def __init__(self, piece: Piece) -> None:
        self.file, self.at = piece.file, 0
        with open_decompressed(piece.file) as stream:
            raw = read_up_to(stream, MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise DataError(
                f"{self.file} is larger than {MAX_BYTES / 2**20:g} MiB, the limit for a JSON list, which is loaded "
                "into memory; "
                f"convert it to JSON Lines, a row such as {EXAMPLE_ROW} on each line"
            )
        if raw.startswith(b"\xef\xbb\xbf"):
            raise DataError(f"{self.file} starts with a byte order mark; save the file as UTF-8 without one")
        try:
            self.all = raw.decode()
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            column = error.start - raw.rfind(b"\n", 0, error.start)
            raise DataError(
                f"{self.file}, line {line}, column {column}: not UTF-8: byte 0x{raw[error.start]:02x}; {ENCODING_HINT}"
            ) from error
        self._counted, self._lines = 0, 1

    def line(self, position: int) -> int:
        """Return the line number of a position, which must not lie before that of the last call."""
        self._lines += self.all.count("\n", self._counted, position)
        self._counted = position
        return self._lines

    def column(self, position: int) -> int:
        return position - self.all.rfind("\n", 0, position)

    def next(self) -> str:
        """Move to the next character that is not white space, and return it; empty at the end."""
        space = _SPACE.match(self.all, self.at)
        assert space is not None
        self.at = space.end()
        return self.all[self.at : self.at + 1]

    def take(self, expected: str) -> str:
        """Consume one of the expected characters, and return it."""
        character = self.next()
        if not character or character not in expected:
            got = f"got {character!r}" if character else "not the end"
            self.fail(self.at, f"expected {' or '.join(expected)}, {got}")
        self.at += 1
        return character

    def skip(self) -> None:
        """Skip one JSON value of any kind."""
        try:
            _, self.at = _lenient(self.all, self.at)
        except json.JSONDecodeError as error:
            self.fail(error.pos, error.msg)
        except (ValueError, RecursionError) as error:
            self.fail(self.at, "nested too deeply" if isinstance(error, RecursionError) else str(error))

    def fail(self, position: int, reason: str) -> NoReturn:
        """Raise DataError for the whole file: what follows cannot be parsed."""
        line = self.all.count("\n", 0, position) + 1
        raise DataError(f"{self.file}, line {line}, column {self.column(position)}: invalid JSON: {reason}")


def _elements(text: _Text) -> Iterator[int]:
    """Yield where each element begins; the caller moves `text.at` behind it before it asks for the next."""
    if text.next() == "{":
        _enter_data(text)
    if text.next() != "[":
        line = text.line(text.at)
        raise DataError(
            f'{text.file}, line {line}: expected a list of objects [{EXAMPLE_ROW}, ...] or {{"data": [...]}}'
        )
    text.at += 1
    if text.next() == "]":
        return
    while True:
        text.next()
        yield text.at
        if text.take(",]") == "]":
            return


def _enter_data(text: _Text) -> None:
    """Move to the value of the key `data` of the object that begins here."""
    text.at += 1
    while text.next() == '"':
        key, text.at = _lenient(text.all, text.at)
        text.take(":")
        text.next()
        if key == "data":
            return
        text.skip()
        if text.take(",}") == "}":
            if not text.next():
                break
            text.fail(text.at, "more text after the first object; set kind: jsonl if each line is a row")
    raise DataError(f'{text.file} is one object without "data"; expected a list of objects or {{"data": [...]}}')


FORMAT = Format(
    kind="json", suffixes=frozenset(f".json{compression}" for compression in ("", *COMPRESSION_SUFFIXES)), read=read
)
