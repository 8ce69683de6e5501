"""Text files: each is one document in strict UTF-8. A long file is cut into pieces that give the same tokens as the whole."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats.compression import COMPRESSION_SUFFIXES, is_compressed, open_binary, open_decompressed
from bottega.data.formats.reader import Format, Piece
from bottega.data.records.record import ENCODING_HINT, BadRecord, Record, is_utf16

PROSE_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".css", ".yaml", ".yml", ".toml", ".xml")
CODE_SUFFIXES = (
    ".py",
    ".pyi",
    ".sh",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".cu",
    ".rs",
    ".go",
    ".java",
    ".js",
    ".ts",
    ".sql",
)

# A constant rather than the requested size: the cuts show in the records, which must not depend on the machine.
MAX_PIECE_BYTES = 16 << 20
_WINDOW_BYTES = 64 << 10


def list_pieces(file: Path, name: str, source: Source, size: int) -> list[Piece]:
    """Return ranges of about MAX_PIECE_BYTES. A compressed file is one piece, which is cut while it is read."""
    total = os.path.getsize(file)
    if total <= MAX_PIECE_BYTES or is_compressed(file):
        return [Piece(file, name)]
    starts = [0]
    with open_binary(file) as stream:
        while (cut := _find_cut(stream, starts[-1] + MAX_PIECE_BYTES, total)) < total:
            starts.append(cut)
    return [Piece(file, name, start, stop) for start, stop in zip(starts, [*starts[1:], None], strict=True)]


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    """Yield the text of the piece as one record; a large compressed file, which is one piece, as several."""
    with open_decompressed(piece.file) as stream:
        if is_compressed(piece.file):
            if piece.start or piece.stop is not None:
                raise DataError(
                    f"{piece.file} is compressed and can only be read from its beginning; decompress it to split it"
                )
            parts = _iter_parts(stream)
        else:
            stream.seek(piece.start)
            raw = stream.read(-1 if piece.stop is None else piece.stop - piece.start)
            parts = iter([(piece.start, raw, piece.stop is not None)])
        for start, raw, is_continued in parts:
            if raw:
                yield _make_record(piece, start, raw, is_continued)


def _make_record(piece: Piece, start: int, raw: bytes, is_continued: bool) -> Record | BadRecord:
    key, where = piece.name, piece.location
    if start:
        key, where = f"{key}@{start}", f"{where}, from byte {start} on"
    else:
        raw = raw.removeprefix(codecs.BOM_UTF8)  # not part of the text
        if is_utf16(raw):
            return BadRecord(key, where, f"UTF-16, not UTF-8; {ENCODING_HINT}")
    nul = raw.find(b"\0")
    if nul != -1:
        return BadRecord(key, where, f"not text: NUL byte at offset {start + nul}")
    try:
        return Record(key, where, {"text": raw.decode(), "continued": is_continued})
    except UnicodeDecodeError as error:
        byte, offset = raw[error.start], start + error.start
        return BadRecord(key, where, f"not UTF-8: byte 0x{byte:02x} at offset {offset}; {ENCODING_HINT}")


def _iter_parts(stream: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (start, bytes, continued) of a stream that cannot seek, cut at the same offsets as an uncompressed file."""
    start, pending = 0, b""
    while True:
        # As far as `_find_cut` searches, and one byte more, which tells whether a character ends there.
        pending += stream.read(2 * MAX_PIECE_BYTES + 1 - len(pending))
        cut = _find_safe_newline(pending, MAX_PIECE_BYTES, 2 * MAX_PIECE_BYTES)
        if cut is None and len(pending) > 2 * MAX_PIECE_BYTES:
            cut = _find_character_start(pending, 2 * MAX_PIECE_BYTES)
        if cut is None:
            yield start, pending, False
            return
        yield start, pending[:cut], True
        start, pending = start + cut, pending[cut:]


def _find_cut(stream: BinaryIO, position: int, total: int) -> int:
    """Return the first offset from `position` on where the file may be cut; its end if less than MAX_PIECE_BYTES remain."""
    max_cut = position + MAX_PIECE_BYTES
    offset = position
    while offset < min(max_cut, total):
        # Four more bytes in front: the character before a newline decides whether the file may be cut there.
        stream.seek(offset - 4)
        window = stream.read(4 + min(_WINDOW_BYTES, max_cut - offset))
        if len(window) <= 4:  # the file was truncated meanwhile
            return total
        newline = _find_safe_newline(window, 4, len(window))
        if newline is not None:
            return offset - 4 + newline
        offset += len(window) - 4
    if max_cut >= total:
        return total
    stream.seek(max_cut - 4)
    surrounding = stream.read(8)
    return max_cut - 4 + _find_character_start(surrounding, 4) if len(surrounding) > 4 else total


def _find_safe_newline(raw: bytes, start: int, stop: int) -> int | None:
    """Return the first newline in raw[start:stop] that does not follow white space; see bytelevel.split_at_safe_points."""
    at = raw.find(b"\n", start, stop)
    while at != -1:
        preceding = raw[max(at - 4, 0) : at].decode(errors="ignore")
        if preceding and not preceding[-1].isspace():
            return at
        at = raw.find(b"\n", at + 1, stop)
    return None


def _find_character_start(raw: bytes, at: int) -> int:
    """Return the start of the UTF-8 character at `at`, up to three bytes before it."""
    return next((at - back for back in range(4) if raw[at - back] & 0xC0 != 0x80), at)


FORMAT = Format(
    kind="text",
    suffixes=frozenset(
        f"{suffix}{compression}"
        for suffix in (*PROSE_SUFFIXES, *CODE_SUFFIXES)
        for compression in ("", *COMPRESSION_SUFFIXES)
    ),
    read=read,
    list_pieces=list_pieces,
)
