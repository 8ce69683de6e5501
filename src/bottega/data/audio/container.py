"""Detect truncated audio files by the lengths that their containers state, because decoders accept them silently.

libsndfile reads a truncated wav, aiff or au as if it were complete, and takes the last page of a truncated ogg for its end.
"""

from __future__ import annotations

import io
import struct
from typing import BinaryIO, Literal, NamedTuple

from bottega.data.records.record import Unreadable

Container = Literal["wav", "aiff", "caf", "w64", "au", "flac", "ogg", "mp3", "matroska", "mp4", "other"]

# The possible first four bytes of a format, and the offset and value of further bytes that identify it.
MAGIC: dict[Container, tuple[tuple[bytes, ...], int, bytes]] = {
    "wav": ((b"RIFF", b"RIFX", b"RF64"), 8, b"WAVE"),
    "aiff": ((b"FORM",), 8, b"AIF"),
    "caf": ((b"caff",), 4, b"\0\1"),
    "w64": ((b"riff",), 4, b"\x2e\x91"),
    "au": ((b".snd",), 4, b""),
    "flac": ((b"fLaC",), 4, b""),
    "ogg": ((b"OggS",), 4, b"\0"),
    "matroska": ((b"\x1a\x45\xdf\xa3",), 4, b""),
}


class ChunkLayout(NamedTuple):
    """How a container is divided into chunks, which consist of a name, a length and content."""

    start: int
    """Offset of the first chunk, in bytes."""
    header_format: str
    """Name and length of a chunk, in the notation of `struct`."""
    audio_chunk: bytes
    """Name of the chunk that holds the audio."""
    align: int
    """Chunks start at multiples of this."""
    length_includes_header: bool = False


CHUNK_LAYOUTS: dict[Container, ChunkLayout] = {
    "wav": ChunkLayout(12, "<4sI", b"data", 2),
    "aiff": ChunkLayout(12, ">4sI", b"SSND", 2),
    "caf": ChunkLayout(8, ">4sq", b"data", 1),
    "w64": ChunkLayout(
        40, "<16sq", b"data\xf3\xac\xd3\x11\x8c\xd1\x00\xc0\x4f\x8e\xdb\x8a", 8, length_includes_header=True
    ),
}
# Placeholder lengths of programs that write to a pipe: ffmpeg, sox, and the CAF standard.
UNKNOWN_LENGTHS = frozenset((0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000, -1))
# Bit rates of MPEG layer III: those of versions 2 and 2.5, then those of version 1.
MP3_KILOBITS_PER_SECOND = (
    (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
)
MP3_SAMPLE_RATES = (44100, 48000, 32000)


def detect_container(file: BinaryIO) -> Container:
    """Return the container format by the first bytes of the file; file name suffixes are not reliable."""
    file.seek(0)
    head = file.read(16)
    file.seek(0)
    if head[4:8] == b"ftyp":
        return "mp4"
    for kind, (first_bytes, offset, marker) in MAGIC.items():
        if head[:4] in first_bytes and head[offset : offset + len(marker)] == marker:
            return kind
    return "mp3" if head[:3] == b"ID3" or _compute_frame_bytes(head[:4]) else "other"


def check_complete(file: BinaryIO, kind: Container) -> None:
    """Raise `Unreadable` if the file is shorter than its container states. FLAC is left to its own checksums."""
    size = file.seek(0, io.SEEK_END)
    if kind in CHUNK_LAYOUTS:
        _check_chunks(file, size, CHUNK_LAYOUTS[kind])
    elif kind == "au":
        _check_au(file, size)
    elif kind == "ogg":
        _check_pages(file, size)
    elif kind == "mp3":
        _check_frames(file, size)
    elif kind == "matroska":
        _check_segment(file, size)
    elif kind == "mp4":
        _check_boxes(file, size)
    file.seek(0)


def mp3_states_length(file: BinaryIO) -> bool:
    """Return whether an mp3 states its length; if not, the number of samples that a decoder reports is an estimate."""
    return _read_xing_byte_count(file, _find_first_frame(file)) is not None


def _check_chunks(file: BinaryIO, size: int, layout: ChunkLayout) -> None:
    file.seek(0)
    magic = file.read(4)
    header = struct.Struct(layout.header_format.replace("<", ">") if magic == b"RIFX" else layout.header_format)
    at, has_audio, long_length = layout.start, False, None
    while at + header.size <= size:
        file.seek(at)
        name, length = header.unpack(file.read(header.size))
        length -= header.size if layout.length_includes_header else 0
        if has_audio and (not name[:4].isascii() or not name[:4].decode().isprintable() or at + length > size):
            break
        if name == b"ds64":
            # The lengths of a wav over 4 GiB: the whole file, then the audio data, 8 bytes each.
            lengths = file.read(16)
            long_length = struct.unpack("<QQ", lengths)[1] if len(lengths) == 16 else None
        if name == layout.audio_chunk:
            has_audio = True
            if magic == b"RF64" and long_length is not None:
                length = long_length
            elif length in UNKNOWN_LENGTHS and not 0 <= length <= size:
                return
        if length < 0 or at + header.size + length > size:
            raise Unreadable(
                f"truncated: the header states {length:,} bytes of {name[:4].decode('ascii', 'replace')!r}, "
                f"the file has {size - at - header.size:,}"
            )
        at += header.size + length
        at += -at % layout.align
    if not has_audio:
        raise Unreadable(f"contains no audio: there is no {layout.audio_chunk[:4].decode()!r} chunk")
    _check_trailing_data(file, at, size)


def _check_au(file: BinaryIO, size: int) -> None:
    file.seek(4)
    start, length = struct.unpack(">II", file.read(8))
    if length != 0xFFFFFFFF and start + length > size:
        raise Unreadable(f"truncated: the header states {length:,} bytes, the file has {size - start:,}")


def _check_trailing_data(file: BinaryIO, at: int, size: int) -> None:
    """Raise `Unreadable` for data after the end that the header states, except zeros and small tags."""
    file.seek(at)
    if size - at > 128 and file.read(4096).strip(b"\0"):
        raise Unreadable(f"the header states an end at byte {at:,}, and the file has {size:,} bytes; rewrite the file")


def _check_pages(file: BinaryIO, size: int) -> None:
    """Ogg: the last page must be complete and carry the end-of-stream flag, as the standard requires."""
    at, flags = 0, 0
    while at + 27 <= size:
        file.seek(at)
        head = file.read(27)
        if head[:4] != b"OggS":
            # Data appended after the stream, such as a tag. Gaps within the stream are found by the decoder.
            break
        lacing = file.read(head[26])
        length = 27 + len(lacing) + sum(lacing)
        if len(lacing) < head[26] or at + length > size:
            raise Unreadable(f"truncated: the page at byte {at:,} is {length:,} bytes long, the file ends at {size:,}")
        flags, at = head[5], at + length
    if not flags & 4:
        raise Unreadable(f"truncated: the last page, before byte {at:,}, is not marked as the end of the stream")


def _check_segment(file: BinaryIO, size: int) -> None:
    """Matroska and WebM: one element follows the header and contains the rest of the file."""
    _, length, at = _read_ebml_element(file, 0)
    _, length, at = _read_ebml_element(file, at + length)
    if length >= 0 and at + length > size:
        raise Unreadable(f"truncated: the header states {length:,} bytes, the file has {size - at:,}")


def _read_ebml_element(file: BinaryIO, at: int) -> tuple[int, int, int]:
    """Return the id, length (-1 if unknown) and content offset of the EBML element at byte `at`."""
    file.seek(at)
    raw = file.read(12)
    if len(raw) < 12 or not raw[0] & 0xF0:
        raise Unreadable(f"truncated or damaged: no EBML element at byte {at:,}")
    width = 9 - raw[0].bit_length()
    length_bits = raw[width].bit_length()
    if not length_bits:
        raise Unreadable(f"damaged: the element at byte {at:,} has no length")
    end = width + 9 - length_bits
    length = int.from_bytes(raw[width:end], "big") - (1 << 7 * (9 - length_bits))
    is_unknown = length == (1 << 7 * (9 - length_bits)) - 1
    return int.from_bytes(raw[:width], "big"), -1 if is_unknown else length, at + end


def _check_boxes(file: BinaryIO, size: int) -> None:
    """MP4, M4A, QuickTime: boxes of length, name and content.

    A length of 1 means that a 64-bit length follows the name; a length of 0 means that the box extends to the end.
    """
    at = 0
    while at + 16 <= size:
        file.seek(at)
        length, name, long_length = struct.unpack(">I4sQ", file.read(16))
        length = long_length if length == 1 else length
        if length < 8:
            return
        if at + length > size:
            box = name.decode("ascii", "replace")
            raise Unreadable(f"truncated: {box!r} at byte {at:,} is {length:,} bytes long, the file ends at {size:,}")
        at += length


def _check_frames(file: BinaryIO, size: int) -> None:
    """Mp3: compare with the byte count of the Xing header if there is one, else walk through the frames."""
    at = _find_first_frame(file)
    stated_bytes = _read_xing_byte_count(file, at)
    if stated_bytes is not None:
        if at + stated_bytes > size:
            raise Unreadable(f"truncated: the header states {stated_bytes:,} bytes, the file has {size - at:,}")
        return
    while at + 4 <= size:
        file.seek(at)
        length = _compute_frame_bytes(file.read(4))
        if not length:
            return
        at += length
    if at > size:
        raise Unreadable(f"truncated: the last frame ends at byte {at:,}, the file at {size:,}")


def _find_first_frame(file: BinaryIO) -> int:
    """Return the offset of the first frame, after the ID3v2 tag, whose length is stored in 7 bits per byte."""
    file.seek(0)
    head = file.read(10)
    if head[:3] != b"ID3" or len(head) < 10:
        return 0
    length = sum(byte << shift for byte, shift in zip(head[6:], (21, 14, 7, 0), strict=True))
    return 10 + length + (10 if head[5] & 0x10 else 0)


def _read_xing_byte_count(file: BinaryIO, at: int) -> int | None:
    """Return the byte count of all frames, which LAME and others store in a silent first frame; None if it is missing."""
    file.seek(at)
    frame = file.read(64)
    # The Xing header follows the side information, whose size depends on version and channels.
    for offset in (13, 21, 36):
        if frame[offset : offset + 4] in (b"Xing", b"Info") and len(frame) >= offset + 16:
            flags, _, num_bytes = struct.unpack(">III", frame[offset + 4 : offset + 16])
            # Bit 0: the number of frames is present; bit 1: the number of bytes, which comes second.
            return num_bytes if flags & 3 == 3 else None
    return None


def _compute_frame_bytes(head: bytes) -> int:
    """Return the length in bytes of the layer III frame with this header; 0 for any other header or a free bit rate."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
        return 0
    version, bit_rate_index, sample_rate_index = head[1] >> 3 & 3, head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or bit_rate_index in (0, 15) or sample_rate_index == 3:
        return 0
    is_version_1 = version == 3
    hertz = MP3_SAMPLE_RATES[sample_rate_index] // (1 if is_version_1 else 2 if version == 2 else 4)
    return (144 if is_version_1 else 72) * MP3_KILOBITS_PER_SECOND[is_version_1][bit_rate_index - 1] * 1000 // hertz + (
        head[2] >> 1 & 1
    )
