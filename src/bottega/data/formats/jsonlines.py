"""JSON Lines: one object per line. A line that cannot be parsed is one bad record, reported with its line number.

Media are written as files beside the table: SPLIT/metadata.jsonl and SPLIT/0001.png, the layout of Hugging Face's
imagefolder and audiofolder, in which the column `file_name` names the file of a row.
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
from bottega.data.formats import compression
from bottega.data.formats.compression import COMPRESSION_SUFFIXES, is_compressed, open_binary, open_decompressed
from bottega.data.formats.reader import Format, Piece
from bottega.data.formats.write import OutputShard, encode_json, encode_medium
from bottega.data.records.record import ENCODING_HINT, BadRecord, Record, is_utf16

EXAMPLE_ROW = '{"text": "..."}'
_BLOCK_BYTES = 1 << 20
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_CONSTANT = re.compile(r'"(?:[^"\\]|\\.)*"|(?P<constant>NaN|-?Infinity)')


class InvalidRow(ValueError):
    """Raised for text that is not a valid row. The message says why; `column` says where, if known."""

    def __init__(self, reason: str, column: int | None = None) -> None:
        super().__init__(reason)
        self.column = column


def list_pieces(file: Path, name: str, source: Source, size: int) -> list[Piece]:
    """Cut at the first line end at least `size` bytes after the previous cut; a compressed file is one piece."""
    total = os.path.getsize(file)
    if total <= size or is_compressed(file):
        return [Piece(file, name)]
    pieces: list[Piece] = []
    start = num_lines = 0
    with open_binary(file) as stream:
        while start + size < total:
            stop, newlines = _find_line_end(stream, start, size)
            if stop >= total or stop == start:
                break
            pieces.append(Piece(file, name, start, stop, num_lines))
            start, num_lines = stop, num_lines + newlines
    return [*pieces, Piece(file, name, start, None, num_lines)]


def _find_line_end(stream: Any, start: int, size: int) -> tuple[int, int]:
    """Return the offset at which the line at `start + size` ends, and the number of lines from `start` to that offset."""
    stream.seek(start)
    num_lines, bytes_left = 0, size
    while bytes_left:
        block = stream.read(min(bytes_left, _BLOCK_BYTES))
        if not block:  # the file was truncated meanwhile
            return start + size - bytes_left, num_lines
        num_lines, bytes_left = num_lines + block.count(b"\n"), bytes_left - len(block)
    if block.endswith(b"\n"):
        return start + size, num_lines
    stop = start + size
    # In blocks: the line may be longer than the memory.
    while line_part := stream.readline(_BLOCK_BYTES):
        stop += len(line_part)
        if line_part.endswith(b"\n"):
            return stop, num_lines + 1
    return stop, num_lines


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    """Yield the rows of a piece."""
    name, location, limit = piece.name, piece.location, compression.MAX_LINE_BYTES
    with open_decompressed(piece.file) as stream:
        if piece.start:
            stream.seek(piece.start)
        length = None if piece.stop is None else piece.stop - piece.start
        for number, raw in enumerate(compression.iter_lines(stream, length), start=piece.records_before + 1):
            key, where = f"{name}:{number}", f"{location}, line {number}"
            if len(raw) > limit and not raw.endswith(b"\n"):
                yield BadRecord(key, where, f"longer than {limit:,} bytes; write one JSON object per line")
                continue
            try:
                yield Record(key, where, parse_row(raw.decode()))
            except (ValueError, RecursionError) as error:
                # An empty line is neither a record nor an error.
                if not raw.isspace():
                    reason = _explain_error(raw, error)
                    column = reason.column
                    yield BadRecord(key, where if column is None else f"{where}, column {column}", str(reason))


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _check_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        (repeated, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise InvalidRow(f"key {repeated!r} occurs twice in one object")
    return fields


decode_json = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_check_unique_keys).raw_decode
"""(text, index) to (value, end) of the JSON value that begins there; white space before it is an error."""


def parse_row(text: str) -> dict[str, Any]:
    """Parse one JSON object strictly: NaN and Infinity, repeated keys and lone surrogates raise ValueError."""
    text = text.strip(" \t\r\n")
    fields, end = decode_json(text)
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, len(text) - len(text[end:].lstrip(" \t\r")))
    check_row(fields, text)
    return fields


def check_row(fields: Any, text: str, start: int = 0, end: int = sys.maxsize) -> None:
    """Raise InvalidRow unless the value read from `text[start:end]` is an object without lone surrogates."""
    if type(fields) is not dict:
        raise InvalidRow(f"a row must be an object such as {EXAMPLE_ROW}, not {type(fields).__name__}")
    if text.find("\\", start, end) != -1 and _SURROGATE_ESCAPE.search(text, start, end):
        _check_surrogates(fields)


def _check_surrogates(fields: dict[str, Any]) -> None:
    for key, value in fields.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if surrogate := _LONE_SURROGATE.search(text):
            position = f" at character {surrogate.start()}" if text is value else ""
            raise InvalidRow(f"field {key!r} has an unpaired surrogate ({surrogate.group()!r}){position}")
        if _LONE_SURROGATE.search(key):
            raise InvalidRow(f"key {key!r} has an unpaired surrogate")


def _explain_error(raw: bytes, error: Exception) -> InvalidRow:
    """Return an InvalidRow that says what is wrong with a line that could not be parsed."""
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
    """Turn an error of the JSON parser into an InvalidRow. The column counts characters from the beginning of the text."""
    if isinstance(error, json.JSONDecodeError):
        num_leading_spaces = len(text) - len(text.lstrip(" \t\r\n"))
        return InvalidRow(f"invalid JSON: {error.msg}", num_leading_spaces + error.colno)
    if isinstance(error, RecursionError):
        return InvalidRow("invalid JSON: nested too deeply")
    constant = next((match for match in _CONSTANT.finditer(text) if match["constant"]), None)
    return InvalidRow(f"invalid JSON: {error}", None if constant is None else constant.start() + 1)


FORMAT = Format(
    kind="jsonl",
    suffixes=frozenset(
        f"{suffix}{compression}" for suffix in (".jsonl", ".ndjson") for compression in ("", *COMPRESSION_SUFFIXES)
    ),
    read=read,
    list_pieces=list_pieces,
)


@final
class JsonLinesShard(OutputShard):
    """Rows as JSON Lines. If the first row has media, the media of all rows are written as files, and the split is one shard."""

    def __init__(self, folder: Path, split: str, number: int) -> None:
        self._folder = folder / split
        self.path = folder / f"{split}-{number:06d}.jsonl"
        self._file: BufferedWriter | None = None
        self._has_media = False

    def add(self, record: Record, name: str) -> None:
        media = {
            field: encoded for field, value in record.fields.items() if (encoded := encode_medium(field, value, record))
        }
        if self._file is None:
            self._has_media = bool(media)
            if media:
                self._folder.mkdir()
                self.path = self._folder / "metadata.jsonl"
            self._file = self.path.open("wb")
        if media and not self._has_media:
            raise DataError(
                f"{record.where}: has media ({', '.join(media)}), but the rows before it have none; put rows with media in another split"
            )
        row: dict[str, Any] = {}
        for number, (field, (suffix, data)) in enumerate(media.items()):
            # Names have no dot, so this cannot be the file of another row.
            file = f"{name}.{suffix}" if number == 0 else f"{name}.{number}.{suffix}"
            with (self._folder / file).open("xb") as out:
                out.write(data)
            row["file_name" if number == 0 else f"{field}_file_name"] = file
        row |= {field: value for field, value in record.fields.items() if field not in media and field not in row}
        line = encode_json(row, record, ", ".join(row)) + b"\n"
        self._file.write(line)
        # A split with media is one shard, so its size never reaches the limit at which the next shard begins.
        self.size += 0 if self._has_media else len(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
