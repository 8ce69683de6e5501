"""Detect truncated video files by the lengths that their containers state, because decoders stop silently.

Three families of containers state their length: MP4 and MOV (boxes with sizes), Matroska and WebM (one segment with a
size) and AVI (RIFF chunks with sizes). A file without a stated length, such as a live recording, passes.
"""

from __future__ import annotations

import os
from typing import BinaryIO

EBML, SEGMENT = 0x1A45DFA3, 0x18538067
FIRST_BOX_TYPES = frozenset((b"ftyp", b"styp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"))


def count_missing_bytes(stream: BinaryIO) -> int:
    """Return how many bytes are missing at the end of the file; 0 if it is complete or states no length."""
    length = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    head = stream.read(12)
    if head[:4] == b"RIFF":
        end = _find_riff_end(stream, length)
    elif int.from_bytes(head[:4], "big") == EBML:
        end = _find_matroska_end(stream)
    elif head[4:8] in FIRST_BOX_TYPES:
        end = _find_boxes_end(stream, length)
    else:
        end = 0
    return max(0, end - length)


def _find_riff_end(stream: BinaryIO, length: int) -> int:
    """Return the end of an AVI file in bytes by the sizes that it states, 0 if unknown. Files over 1 GiB have several RIFF chunks."""
    at = 0
    while at + 8 <= length:
        stream.seek(at)
        head = stream.read(8)
        size = int.from_bytes(head[4:], "little")
        if head[:4] not in (b"RIFF", b"JUNK") or size == 0:
            return 0
        at += 8 + size
    return at


def _find_boxes_end(stream: BinaryIO, length: int) -> int:
    """Return the end of an MP4 or MOV file in bytes by the sizes that it states, 0 if unknown."""
    at = 0
    while at + 8 <= length:
        stream.seek(at)
        head = stream.read(16)
        size, box_type = int.from_bytes(head[:4], "big"), head[4:8]
        if size == 1:  # the 64-bit size follows
            size = int.from_bytes(head[8:], "big")
        # A box of size 0 extends to the end of the file; data without a valid box type was appended to the file.
        if size < 8 or not (box_type.isascii() and box_type.decode("latin-1").isprintable()):
            return 0
        at += size
    return at


def _find_matroska_end(stream: BinaryIO) -> int:
    """Return the end of a Matroska or WebM file in bytes by the sizes that it states, 0 if unknown."""
    stream.seek(4)
    header_size = _read_variable_integer(stream)
    if header_size is None:
        return 0
    stream.seek(header_size, os.SEEK_CUR)
    if int.from_bytes(stream.read(4), "big") != SEGMENT:
        return 0
    size = _read_variable_integer(stream)
    return 0 if size is None else stream.tell() + size


def _read_variable_integer(stream: BinaryIO) -> int | None:
    """Read an EBML variable-length integer; None if it is missing, invalid or unknown (all bits set)."""
    first_byte = stream.read(1)
    if not first_byte or not first_byte[0]:
        return None
    num_extra_bytes = 8 - first_byte[0].bit_length()
    value = int.from_bytes(first_byte + stream.read(num_extra_bytes), "big")
    bits = 7 * (num_extra_bytes + 1)
    value &= (1 << bits) - 1
    return None if value == (1 << bits) - 1 else value
