"""Compressed files as streams of bytes (gzip, Zstandard, bzip2, xz), safe against compression bombs and endless lines."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, final

from bottega.core.errors import DataError, EnvironmentProblem

COMPRESSION_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
COMPRESSION_NAMES = {".gz": "gzip", ".zst": "Zstandard", ".bz2": "bzip2", ".xz": "xz"}

# Text compresses to a fifth, a table of zeros to a hundredth; deflate reaches a ratio of 1,032 and Zstandard 30,000.
MAX_RATIO = 1_000
# Bytes that any file may decompress to, whatever the ratio.
ALWAYS_ALLOWED_BYTES = 64 << 20
MAX_LINE_BYTES = 64 << 20

_CHUNK_BYTES = 1 << 20
# Four bytes of Zstandard can stand for 128 KiB, and its decoder has no limit on its output: 1 KiB gives 32 MiB.
_ZSTD_READ_BYTES = 1 << 10
# Memory a decoder may allocate for its window; xz -9 needs 65 MiB.
_MAX_WINDOW_BYTES = 256 << 20


def open_binary(file: Path) -> BufferedReader:
    """Open a file for reading. Raises EnvironmentProblem without permission, and DataError for other errors."""
    try:
        return file.open("rb")
    except PermissionError as error:
        raise EnvironmentProblem(f"cannot read {file}: permission denied; change its mode or owner") from error
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error


def open_decompressed(file: Path) -> BufferedReader:
    """Open a file for reading, decompressing it. Its first bytes determine the compression; the suffix must agree."""
    raw = open_binary(file)
    try:
        compression = _detect_compression(raw.read(10))
        raw.seek(0)
        suffix = file.suffix.lower()
        if suffix in COMPRESSION_SUFFIXES and compression != suffix and file.stat().st_size:
            raise DataError(
                f"{file} is not a {COMPRESSION_NAMES[suffix]} file; remove {suffix} from its name if it is not compressed"
            )
        if compression is None:
            return raw
        return BufferedReader(_DecompressedStream(raw, file, compression), _CHUNK_BYTES)
    except BaseException:
        raw.close()
        raise


def is_compressed(file: Path) -> bool:
    """Return whether the file starts like a known compression format."""
    with open_binary(file) as raw:
        return _detect_compression(raw.read(10)) is not None


def read_head(file: Path, size: int) -> bytes:
    """Return the first bytes of the decompressed content; empty if it cannot be decompressed."""
    try:
        with open_decompressed(file) as stream:
            return stream.read(size)
    except DataError:
        return b""


def iter_lines(stream: BinaryIO, length: int | None = None) -> Iterator[bytes]:
    """Yield the lines of the next `length` bytes with their line ends.

    Of a line longer than MAX_LINE_BYTES only MAX_LINE_BYTES + 1 bytes are yielded, by which the caller recognises it.
    """
    limit, position = MAX_LINE_BYTES, 0
    while (length is None or position < length) and (line := stream.readline(limit + 1)):
        position += len(line)
        if len(line) > limit and not line.endswith(b"\n"):
            while skipped := stream.readline(_CHUNK_BYTES):
                position += len(skipped)
                if skipped.endswith(b"\n"):
                    break
        yield line


def _detect_compression(head: bytes) -> str | None:
    if head.startswith(b"\x1f\x8b"):
        return ".gz"
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5):
        return ".zst"
    if head.startswith(b"\xfd7zXZ\0"):
        return ".xz"
    # A text may begin with BZh too; the magic number after it has the digits of pi, or of its square root in an empty file.
    if head.startswith(b"BZh") and head[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"):
        return ".bz2"
    return None


@final
class _DecompressedStream(io.RawIOBase):
    """The output of a decoder; damaged data and compression bombs raise a DataError of one line."""

    def __init__(self, raw: BinaryIO, file: Path, compression: str) -> None:
        self._raw, self._file, self._compression = raw, file, compression
        self._chunks = _iter_chunks(
            raw, _choose_decoder(compression, file), read_size=_ZSTD_READ_BYTES if compression == ".zst" else 1 << 16
        )
        self._unread = memoryview(b"")
        self._decompressed_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unread:
            chunk = self._read_chunk()
            if chunk is None:
                return 0
            self._unread = memoryview(chunk)
        size = min(len(buffer), len(self._unread))
        buffer[:size] = self._unread[:size]
        self._unread = self._unread[size:]
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()

    def _read_chunk(self) -> bytes | None:
        try:
            chunk = next(self._chunks, None)
        except EOFError as error:
            raise DataError(
                f"{self._file} is truncated: its {COMPRESSION_NAMES[self._compression]} data ends early"
            ) from error
        except OSError as error:
            if error.errno is not None:  # a problem of the disk, not of the content
                raise DataError(f"cannot read {self._file}: {error.strerror}") from error
            raise self._make_damage_error(error) from error
        except _list_decoder_errors(self._compression) as error:
            raise self._make_damage_error(error) from error
        if chunk is not None:
            self._decompressed_bytes += len(chunk)
            if self._decompressed_bytes > max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * self._raw.tell()):
                raise DataError(
                    f"{self._file} decompresses to more than {MAX_RATIO:,} times its size, like a compression bomb; "
                    "decompress it yourself if you trust it"
                )
        return chunk

    def _make_damage_error(self, error: Exception) -> DataError:
        reason = " ".join(str(error).split()) or type(error).__name__
        return DataError(f"{self._file} is damaged: {COMPRESSION_NAMES[self._compression]}: {reason}")


def _iter_chunks(raw: BinaryIO, create_decoder: Callable[[], Any], *, read_size: int) -> Iterator[bytes]:
    """Yield decompressed bytes, about a MiB at a time. Concatenated members are one stream."""
    pending = raw.read(read_size)
    while pending:
        decoder = create_decoder()
        while not decoder.eof:
            needs_input = getattr(decoder, "needs_input", True)  # bz2 and lzma keep the input they have not used
            if needs_input and not pending:
                pending = raw.read(read_size)
                if not pending:
                    raise EOFError
            yield decoder.decompress(pending, _CHUNK_BYTES)
            pending = getattr(decoder, "unconsumed_tail", b"")
        pending = decoder.unused_data or raw.read(read_size)
        # Tapes and xz pad with zeros after the last member.
        while pending and not pending.strip(b"\0"):
            pending = raw.read(read_size)
        pending = pending.lstrip(b"\0")


def _choose_decoder(compression: str, file: Path) -> Callable[[], Any]:
    if compression == ".gz":
        return lambda: zlib.decompressobj(zlib.MAX_WBITS | 16)
    if compression == ".bz2":
        return bz2.BZ2Decompressor
    if compression == ".xz":
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_WINDOW_BYTES)
    try:
        import zstandard
    except ImportError as error:
        raise EnvironmentProblem(f"{file}: reading .zst needs zstandard; pip install 'bottega[data]'") from error
    return lambda: _ZstdDecoder(zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj())


@final
class _ZstdDecoder:
    """Zstandard's decoder with the interface of the decoders of the standard library."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def decompress(self, data: bytes, size: int) -> bytes:
        return bytes(self._decoder.decompress(data))

    @property
    def eof(self) -> bool:
        return bool(self._decoder.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._decoder.unused_data)


def _list_decoder_errors(compression: str) -> tuple[type[Exception], ...]:
    """Return the exceptions a decoder raises on damaged data."""
    if compression != ".zst":
        return zlib.error, lzma.LZMAError, ValueError
    import zstandard

    return zstandard.ZstdError, ValueError
