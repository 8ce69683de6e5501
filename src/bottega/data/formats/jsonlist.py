"""JSON files that hold one list of objects, or {"data": [...]}: loaded whole and parsed element by element."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NoReturn, final

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats.compression import COMPRESSION_SUFFIXES, open_decompressed
from bottega.data.formats.jsonlines import EXAMPLE_ROW, InvalidRow, check_row, decode_json, explain_json_error
from bottega.data.formats.reader import Format, Piece
from bottega.data.records.archive_members import read_up_to
from bottega.data.records.record import ENCODING_HINT, BadRecord, Record

MAX_BYTES = 256 << 20
"""Maximum size of the decompressed text. One emoji makes Python store every character in four bytes, and rows are in
memory twice."""
_SPACE = re.compile(r"[ \t\r\n]*")
# Finds the end of an element that is JSON but not a valid row, so that reading can continue after it.
_decode_leniently = json.JSONDecoder().raw_decode


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    """Yield the elements of a JSON array one by one, with line and column as their location."""
    cursor = _TextCursor(piece)
    for number, start in enumerate(_iter_elements(cursor), start=1):
        key, line = f"{piece.name}:{number}", cursor.find_line(start)
        where = f"{piece.location}, line {line}, column {cursor.find_column(start)}"
        try:
            fields, end = decode_json(cursor.text, start)
            cursor.position = end
            check_row(fields, cursor.text, start, end)
            yield Record(key, where, fields)
        except json.JSONDecodeError as error:
            cursor.fail(error.pos, error.msg)
        except (ValueError, RecursionError) as error:
            if cursor.position == start:
                cursor.skip_value()
            reason = error if isinstance(error, InvalidRow) else explain_json_error(error, "")
            yield BadRecord(key, where, str(reason))


@final
class _TextCursor:
    """The text of a file and a position in it."""

    def __init__(self, piece: Piece) -> None:
        self.file, self.position = piece.file, 0
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
            self.text = raw.decode()
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            column = error.start - raw.rfind(b"\n", 0, error.start)
            raise DataError(
                f"{self.file}, line {line}, column {column}: not UTF-8: byte 0x{raw[error.start]:02x}; {ENCODING_HINT}"
            ) from error
        self._counted_up_to, self._line = 0, 1

    def find_line(self, position: int) -> int:
        """Return the line number of a position, which must not lie before the position of the last call."""
        self._line += self.text.count("\n", self._counted_up_to, position)
        self._counted_up_to = position
        return self._line

    def find_column(self, position: int) -> int:
        return position - self.text.rfind("\n", 0, position)

    def skip_space(self) -> str:
        """Move to the next character that is not white space, and return it, or an empty text at the end."""
        space = _SPACE.match(self.text, self.position)
        assert space is not None
        self.position = space.end()
        return self.text[self.position : self.position + 1]

    def take(self, expected: str) -> str:
        """Consume one of the expected characters, and return it."""
        character = self.skip_space()
        if not character or character not in expected:
            actual = f"got {character!r}" if character else "got the end of the file"
            self.fail(self.position, f"expected {' or '.join(expected)}, {actual}")
        self.position += 1
        return character

    def skip_value(self) -> None:
        """Skip one JSON value of any kind."""
        try:
            _, self.position = _decode_leniently(self.text, self.position)
        except json.JSONDecodeError as error:
            self.fail(error.pos, error.msg)
        except (ValueError, RecursionError) as error:
            self.fail(self.position, "nested too deeply" if isinstance(error, RecursionError) else str(error))

    def fail(self, position: int, reason: str) -> NoReturn:
        """Raise DataError for the whole file: the rest of it cannot be parsed."""
        line = self.text.count("\n", 0, position) + 1
        raise DataError(f"{self.file}, line {line}, column {self.find_column(position)}: invalid JSON: {reason}")


def _iter_elements(cursor: _TextCursor) -> Iterator[int]:
    """Yield the position at which each element begins. The caller moves `cursor.position` to its end before the next step."""
    if cursor.skip_space() == "{":
        _enter_data_list(cursor)
    if cursor.skip_space() != "[":
        line = cursor.find_line(cursor.position)
        raise DataError(
            f'{cursor.file}, line {line}: expected a list of objects [{EXAMPLE_ROW}, ...] or {{"data": [...]}}'
        )
    cursor.position += 1
    if cursor.skip_space() == "]":
        return
    while True:
        cursor.skip_space()
        yield cursor.position
        if cursor.take(",]") == "]":
            return


def _enter_data_list(cursor: _TextCursor) -> None:
    """Move to the value of the key `data` of the object that begins here."""
    cursor.position += 1
    while cursor.skip_space() == '"':
        key, cursor.position = _decode_leniently(cursor.text, cursor.position)
        cursor.take(":")
        cursor.skip_space()
        if key == "data":
            return
        cursor.skip_value()
        if cursor.take(",}") == "}":
            if not cursor.skip_space():
                break
            cursor.fail(cursor.position, "more text after the first object; set kind: jsonl if each line is a row")
    raise DataError(f'{cursor.file} is one object without "data"; expected a list of objects or {{"data": [...]}}')


FORMAT = Format(
    kind="json", suffixes=frozenset(f".json{compression}" for compression in ("", *COMPRESSION_SUFFIXES)), read=read
)
