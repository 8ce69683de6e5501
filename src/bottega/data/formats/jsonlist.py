"""One JSON list of objects in a file, or {"data": [...]}: read whole, one element after the other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NoReturn, final

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats.compression import SUFFIXES as PACKINGS
from bottega.data.formats.compression import open_decompressed
from bottega.data.formats.jsonlines import EXAMPLE_ROW, InvalidRow, check_row, decode, explain_json_error
from bottega.data.formats.reader import Format, Piece
from bottega.data.records.archive_members import read_up_to
from bottega.data.records.record import ENCODING_HINT, BadRecord, Record

LARGEST = 256 << 20
"""Of unpacked text. One rare character makes each of its characters four bytes in memory, and the rows are there twice."""
_SPACE = re.compile(r"[ \t\r\n]*")
# Finds the end of an element that is JSON but no row of ours, so that the next one is read.
_lenient = json.JSONDecoder().raw_decode


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
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
            text.wrong(error.pos, error.msg)
        except (ValueError, RecursionError) as error:
            if text.at == start:
                text.skip()
            reason = error if isinstance(error, InvalidRow) else explain_json_error(error, "")
            yield BadRecord(key, where, str(reason))


@final
class _Text:
    """The file and how far it is read."""

    def __init__(self, piece: Piece) -> None:
        self.file, self.at = piece.file, 0
        with open_decompressed(piece.file) as stream:
            raw = read_up_to(stream, LARGEST + 1)
        if len(raw) > LARGEST:
            raise DataError(
                f"{self.file} is larger than {LARGEST / 2**20:g} MiB, and a JSON list is read whole; "
                f"convert it to JSON lines, a row such as {EXAMPLE_ROW} on each"
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
        """Of a position no earlier than the last one asked for."""
        self._lines += self.all.count("\n", self._counted, position)
        self._counted = position
        return self._lines

    def column(self, position: int) -> int:
        return position - self.all.rfind("\n", 0, position)

    def next(self) -> str:
        """The next character that is no white space; `at` stands on it."""
        found = _SPACE.match(self.all, self.at)
        assert found is not None
        self.at = found.end()
        return self.all[self.at : self.at + 1]

    def take(self, expected: str) -> str:
        """One of the characters expected, passed over."""
        found = self.next()
        if not found or found not in expected:
            self.wrong(
                self.at, f"expected {' or '.join(expected)}" + (f", got {found!r}" if found else ", not the end")
            )
        self.at += 1
        return found

    def skip(self) -> None:
        """Passes over a value of whatever kind."""
        try:
            _, self.at = _lenient(self.all, self.at)
        except json.JSONDecodeError as error:
            self.wrong(error.pos, error.msg)
        except (ValueError, RecursionError) as error:
            self.wrong(self.at, "nested too deeply" if isinstance(error, RecursionError) else str(error))

    def wrong(self, position: int, reason: str) -> NoReturn:
        line = self.all.count("\n", 0, position) + 1
        raise DataError(f"{self.file}, line {line}, column {self.column(position)}: no valid JSON: {reason}")


def _elements(text: _Text) -> Iterator[int]:
    """Where each element begins; whoever asks for the next has passed over the last."""
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
    """To the value of the key `data` of the object that begins here."""
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
            text.wrong(text.at, "an object is followed by more; set kind: jsonl if each line is a row")
    raise DataError(f'{text.file} is one object without "data"; expected a list of objects or {{"data": [...]}}')


FORMAT = Format(kind="json", suffixes=frozenset(f".json{packing}" for packing in ("", *PACKINGS)), read=read)
