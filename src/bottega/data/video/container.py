"""Whether a video file is as long as its own first bytes say: what a decoder that simply stops does not tell.

Three families of containers state their length: MP4 and MOV (boxes with sizes), Matroska and WebM (one segment with a
size) and AVI (RIFF chunks with sizes). Where one states none, as after a live recording, nothing is concluded.
"""

from __future__ import annotations

import os
from typing import BinaryIO

EBML, SEGMENT = 0x1A45DFA3, 0x18538067
FIRST_BOXES = frozenset((b"ftyp", b"styp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"))


def count_missing_bytes(stream: BinaryIO) -> int:
    """How many bytes the file should have beyond its end; 0 where it is whole or nothing can be said."""
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
    """Files over 1 GiB are several RIFF chunks one after the other. A size of 0 was never filled in."""
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
        if size == 1:  # the real one follows, in 64 bits
            size = int.from_bytes(head[8:], "big")
        # A size of 0 reaches to the end of the file; what is no box is something that was appended.
        if size < 8 or not (kind.isascii() and kind.decode("latin-1").isprintable()):
            return 0
        at += size
    return at


def _matroska_end(stream: BinaryIO) -> int:
    stream.seek(4)
    header = _variable(stream)
    if header is None:
        return 0
    stream.seek(header, os.SEEK_CUR)
    if int.from_bytes(stream.read(4), "big") != SEGMENT:
        return 0
    size = _variable(stream)
    return 0 if size is None else stream.tell() + size


def _variable(stream: BinaryIO) -> int | None:
    """A number whose first bit that is set says how many bytes it has; all bits set stand for unknown."""
    first = stream.read(1)
    if not first or not first[0]:
        return None
    extra = 8 - first[0].bit_length()
    value = int.from_bytes(first + stream.read(extra), "big")
    bits = 7 * (extra + 1)
    value &= (1 << bits) - 1
    return None if value == (1 << bits) - 1 else value
