"""JSON lines: an object a line. A bad line costs that line, and is named by its number in the file.

Written, media lie beside them as files: SPLIT/metadata.jsonl and SPLIT/0001.png, the layout of Hugging Face's folders of
images or audio, where `file_name` says which file a row is about.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from io import BufferedWriter
from pathlib import Path
from typing import Any, NoReturn, final

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats import compression as compressed
from bottega.data.formats.compression import SUFFIXES as PACKINGS
from bottega.data.formats.compression import is_compressed, open_binary, open_decompressed
from bottega.data.formats.reader import Format, Piece
from bottega.data.formats.write import OutputShard, encode_json, encode_medium
from bottega.data.records.record import ENCODING_HINT, BadRecord, Record, is_utf16

EXAMPLE_ROW = '{"text": "..."}'
_BLOCK = 1 << 20
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_HALF_PAIR = re.compile(r"[\ud800-\udfff]")
_NO_NUMBER = re.compile(r'"(?:[^"\\]|\\.)*"|(?P<constant>NaN|-?Infinity)')


class InvalidRow(ValueError):
    """Why a text is no row, and the column where there is one."""

    def __init__(self, reason: str, column: int | None = None) -> None:
        super().__init__(reason)
        self.column = column


def list_pieces(file: Path, name: str, source: Source, size: int) -> list[Piece]:
    """Cut at the first line end after each multiple of `size`; what is packed is read from its beginning."""
    total = os.path.getsize(file)
    if total <= size or is_compressed(file):
        return [Piece(file, name)]
    cut: list[Piece] = []
    start = lines = 0
    with open_binary(file) as stream:
        while start + size < total:
            stop, newlines = _line_end(stream, start, size)
            if stop >= total or stop == start:
                break
            cut.append(Piece(file, name, start, stop, lines))
            start, lines = stop, lines + newlines
    return [*cut, Piece(file, name, start, None, lines)]


def _line_end(stream: Any, start: int, size: int) -> tuple[int, int]:
    """Where the line at `start + size` ends, and how many lines there are up to it."""
    stream.seek(start)
    lines, left = 0, size
    while left:
        block = stream.read(min(left, _BLOCK))
        if not block:  # the file is shorter than when it was measured
            return start + size - left, lines
        lines, left = lines + block.count(b"\n"), left - len(block)
    if block.endswith(b"\n"):
        return start + size, lines
    stop = start + size
    # In short steps: the line may be longer than the memory.
    while rest := stream.readline(_BLOCK):
        stop += len(rest)
        if rest.endswith(b"\n"):
            return stop, lines + 1
    return stop, lines


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    name, place, limit = piece.name, piece.location, compressed.LINE_LIMIT
    with open_decompressed(piece.file) as stream:
        if piece.start:
            stream.seek(piece.start)
        length = None if piece.stop is None else piece.stop - piece.start
        for number, raw in enumerate(compressed.iter_lines(stream, length), start=piece.line + 1):
            key, where = f"{name}:{number}", f"{place}, line {number}"
            if len(raw) > limit and not raw.endswith(b"\n"):
                yield BadRecord(key, where, f"longer than {limit:,} bytes; is it one line of JSON per row?")
                continue
            try:
                yield Record(key, where, parse_row(raw.decode()))
            except (ValueError, RecursionError) as error:
                if not raw.isspace():
                    reason = _reason(raw, error)
                    column = reason.column
                    yield BadRecord(key, where if column is None else f"{where}, column {column}", str(reason))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise InvalidRow(f"key {twice!r} stands twice in one object")
    return fields


decode = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_unique).raw_decode
"""(value, end) of the JSON at the beginning of a text, or at an index; no white space before it."""


def parse_row(text: str) -> dict[str, Any]:
    """The object a text holds, read strictly: no constants outside JSON, no key twice, no half characters."""
    text = text.strip(" \t\r\n")
    fields, end = decode(text)
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, len(text) - len(text[end:].lstrip(" \t\r")))
    check_row(fields, text)
    return fields


def check_row(fields: Any, text: str, start: int = 0, end: int = sys.maxsize) -> None:
    """That what was read from `text[start:end]` is an object of whole characters."""
    if type(fields) is not dict:
        raise InvalidRow(f"a row must be an object such as {EXAMPLE_ROW}, not {type(fields).__name__}")
    if text.find("\\", start, end) != -1 and _SURROGATE.search(text, start, end):
        _no_half_pair(fields)


def _no_half_pair(fields: dict[str, Any]) -> None:
    for key, value in fields.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if half := _HALF_PAIR.search(text):
            place = f" at character {half.start()}" if text is value else ""
            raise InvalidRow(f"field {key!r} has half a surrogate pair ({half.group()!r}){place}")
        if _HALF_PAIR.search(key):
            raise InvalidRow(f"key {key!r} has half a surrogate pair")


def _reason(raw: bytes, error: Exception) -> InvalidRow:
    """What is wrong with a line that could not be read, told once it is known that something is."""
    if raw.startswith(b"\xef\xbb\xbf"):
        return InvalidRow("starts with a byte order mark; save the file as UTF-8 without one")
    if is_utf16(raw):
        return InvalidRow(f"the file is UTF-16, not UTF-8; {ENCODING_HINT}")
    if b"\0" in raw:
        return InvalidRow(f"has a NUL byte at column {raw.index(0) + 1}")
    if isinstance(error, InvalidRow):
        return error
    if isinstance(error, UnicodeDecodeError):
        return InvalidRow(f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}; {ENCODING_HINT}")
    return explain_json_error(error, raw.decode())


def explain_json_error(error: Exception, text: str) -> InvalidRow:
    """An error of the JSON reader in our words. The column counts characters from the beginning of the text."""
    if isinstance(error, json.JSONDecodeError):
        before = len(text) - len(text.lstrip(" \t\r\n"))
        return InvalidRow(f"no valid JSON: {error.msg}", before + error.colno)
    if isinstance(error, RecursionError):
        return InvalidRow("no valid JSON: nested too deeply")
    found = next((match for match in _NO_NUMBER.finditer(text) if match["constant"]), None)
    return InvalidRow(f"no valid JSON: {error}", None if found is None else found.start() + 1)


FORMAT = Format(
    kind="jsonl",
    suffixes=frozenset(f"{suffix}{packing}" for suffix in (".jsonl", ".ndjson") for packing in ("", *PACKINGS)),
    read=read,
    list_pieces=list_pieces,
)


@final
class JsonLinesShard(OutputShard):
    """Whether there are media is told by the first row. A split with media is one file: its rows are small."""

    def __init__(self, folder: Path, split: str, number: int) -> None:
        self._folder = folder / split
        self.path = folder / f"{split}-{number:06d}.jsonl"
        self._file: BufferedWriter | None = None
        self._has_media = False

    def add(self, record: Record, name: str) -> None:
        media = {
            field: found for field, value in record.fields.items() if (found := encode_medium(field, value, record))
        }
        if self._file is None:
            self._has_media = bool(media)
            if media:
                self._folder.mkdir()
                self.path = self._folder / "metadata.jsonl"
            self._file = self.path.open("wb")
        if media and not self._has_media:
            raise DataError(f"{record.where}: has {', '.join(media)}, and the rows before it have no media")
        row: dict[str, Any] = {}
        for number, (field, (suffix, data)) in enumerate(media.items()):
            # Names have no dot, so this is no other row's file.
            file = f"{name}.{suffix}" if number == 0 else f"{name}.{number}.{suffix}"
            with (self._folder / file).open("xb") as out:
                out.write(data)
            row["file_name" if number == 0 else f"{field}_file_name"] = file
        row |= {field: value for field, value in record.fields.items() if field not in media and field not in row}
        line = encode_json(row, record, ", ".join(row)) + b"\n"
        self._file.write(line)
        self.size += 0 if self._has_media else len(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
