"""Detect truncated video files by the lengths that their containers state, because decoders stop silently.

Three families of containers state their length: MP4 and MOV (boxes with sizes), Matroska and WebM (one segment with a
size) and AVI (RIFF chunks with sizes). A file without a stated length, such as a live recording, passes.
"""

from __future__ import annotations

import os
from typing import BinaryIO

EBML, SEGMENT = 0x1A45DFA3, 0x18538067
FIRST_BOXES = frozenset((b"ftyp", b"styp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"))


def count_missing_bytes(stream: BinaryIO) -> int:
    """Return how many bytes are missing at the end of the file; 0 if it is complete or states no length."""
    length = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    head = stream.read(12)
    if head[:4] == b"RIFF":
        end = _riff_end(stream, length)
    elif int.from_bytes(head[:4], "big") == EBML:
        end = _matroska_end(stream)
    elif head[4:8] in FIRST_BOXES:
        end = _boxes_end(stream, length)
    else:
        end = 0
    return max(0, end - length)


def _riff_end(stream: BinaryIO, length: int) -> int:
    """Return the stated end of an AVI. Files over 1 GiB have several RIFF chunks; a size of 0 is unknown."""
    at = 0
    while at + 8 <= length:
        stream.seek(at)
        head = stream.read(8)
        size = int.from_bytes(head[4:], "little")
        if head[:4] not in (b"RIFF", b"JUNK") or size == 0:
            return 0
        at += 8 + size
    return at


def _boxes_end(stream: BinaryIO, length: int) -> int:
    at = 0
    while at + 8 <= length:
        stream.seek(at)
        head = stream.read(16)
        size, kind = int.from_bytes(head[:4], "big"), head[4:8]
        if size == 1:  # the 64-bit size follows
            size = int.from_bytes(head[8:], "big")
        # A size of 0 reaches to the end of the file; anything that is not a box was appended.
        if size < 8 or not (kind.isascii() and kind.decode("latin-1").isprintable()):
            return 0
        at += size
    return at


def _matroska_end(stream: BinaryIO) -> int:
    stream.seek(4)
    header = _read_variable_integer(stream)
    if header is None:
        return 0
    stream.seek(header, os.SEEK_CUR)
    if int.from_bytes(stream.read(4), "big") != SEGMENT:
        return 0
    size = _read_variable_integer(stream)
    return 0 if size is None else stream.tell() + size


def _read_variable_integer(stream: BinaryIO) -> int | None:
    """Read an EBML variable-length integer; None if it is unknown (all bits set)."""
    first = stream.read(1)
    if not first or not first[0]:
        return None
    extra = 8 - first[0].bit_length()
    value = int.from_bytes(first + stream.read(extra), "big")
    bits = 7 * (extra + 1)
    value &= (1 << bits) - 1
    return None if value == (1 << bits) - 1 else value
