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
NAMES = {".gz": "gzip", ".zst": "Zstandard", ".bz2": "bzip2", ".xz": "xz"}

# Text compresses to a fifth, a table of zeros to a hundredth; deflate reaches a ratio of 1,032 and Zstandard 30,000.
MAX_RATIO = 1_000
# Bytes that any file may decompress to, whatever the ratio.
ALWAYS_ALLOWED = 64 << 20
LINE_LIMIT = 64 << 20

_CHUNK = 1 << 20
# Four bytes of Zstandard can stand for 128 KiB, and its decoder has no limit on its output: 1 KiB gives 32 MiB.
_ZSTD_STEP = 1 << 10
# Memory a decoder may allocate for its window; xz -9 needs 65 MiB.
_MAX_WINDOW = 256 << 20


def open_binary(file: Path) -> BufferedReader:
    """Open a file for reading. Raises EnvironmentProblem without permission, and DataError for any other reason."""
    try:
        return file.open("rb")
    except PermissionError as error:
        raise EnvironmentProblem(f"cannot read {file}: permission denied; change its mode or owner") from error
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error


def open_decompressed(file: Path) -> BufferedReader:
    """Open a file for reading, decompressing it. Its first bytes tell the compression; the suffix must agree."""
    raw = open_binary(file)
    try:
        compression = _detect_compression(raw.read(10))
        raw.seek(0)
        suffix = file.suffix.lower()
        if suffix in COMPRESSION_SUFFIXES and compression != suffix and file.stat().st_size:
            raise DataError(
                f"{file} is not a {NAMES[suffix]} file; remove {suffix} from its name if it is not compressed"
            )
        if compression is None:
            return raw
        return BufferedReader(_Decompressed(raw, file, compression), _CHUNK)
    except BaseException:
        raw.close()
        raise


def is_compressed(file: Path) -> bool:
    """Return whether the file starts like a known compression format."""
    with open_binary(file) as raw:
        return _detect_compression(raw.read(10)) is not None


def read_head(file: Path, size: int) -> bytes:
    """Return the first bytes of the decompressed content; none if it cannot be decompressed."""
    try:
        with open_decompressed(file) as stream:
            return stream.read(size)
    except DataError:
        return b""


def iter_lines(stream: BinaryIO, length: int | None = None) -> Iterator[bytes]:
    """Yield the lines of the next `length` bytes with their line ends; one above LINE_LIMIT is cut to LINE_LIMIT + 1 bytes."""
    limit, position = LINE_LIMIT, 0
    while (length is None or position < length) and (line := stream.readline(limit + 1)):
        position += len(line)
        if len(line) > limit and not line.endswith(b"\n"):
            while rest := stream.readline(_CHUNK):
                position += len(rest)
                if rest.endswith(b"\n"):
                    break
        yield line


def _detect_compression(first: bytes) -> str | None:
    if first.startswith(b"\x1f\x8b"):
        return ".gz"
    if first.startswith(b"\x28\xb5\x2f\xfd") or (first[1:4] == b"\x2a\x4d\x18" and first[0] >> 4 == 5):
        return ".zst"
    if first.startswith(b"\xfd7zXZ\0"):
        return ".xz"
    # Three letters could be text; the magic number after them is pi, or its square root in an empty file.
    if first.startswith(b"BZh") and first[4:10] in (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90"):
        return ".bz2"
    return None


@final
class _Decompressed(io.RawIOBase):
    """The output of a decoder; damage and bombs become a DataError of one line."""

    def __init__(self, raw: BinaryIO, file: Path, compression: str) -> None:
        self._raw, self._file, self._compression = raw, file, compression
        self._chunks = _chunks(raw, _decoder(compression, file), step=_ZSTD_STEP if compression == ".zst" else 1 << 16)
        self._ready = memoryview(b"")
        self._num_read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self._ready:
            chunk = self._next()
            if chunk is None:
                return 0
            self._ready = memoryview(chunk)
        size = min(len(into), len(self._ready))
        into[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()

    def _next(self) -> bytes | None:
        try:
            chunk = next(self._chunks, None)
        except EOFError as error:
            raise DataError(f"{self._file} is truncated: its {NAMES[self._compression]} data ends early") from error
        except OSError as error:
            if error.errno is not None:  # the disk, not the content
                raise DataError(f"cannot read {self._file}: {error.strerror}") from error
            raise self._damaged(error) from error
        except _errors(self._compression) as error:
            raise self._damaged(error) from error
        if chunk is not None:
            self._num_read += len(chunk)
            if self._num_read > max(ALWAYS_ALLOWED, MAX_RATIO * self._raw.tell()):
                raise DataError(
                    f"{self._file} decompresses to more than {MAX_RATIO:,} times its size, like a compression bomb; "
                    "decompress it yourself if you trust it"
                )
        return chunk

    def _damaged(self, error: Exception) -> DataError:
        reason = " ".join(str(error).split()) or type(error).__name__
        return DataError(f"{self._file} is damaged: {NAMES[self._compression]}: {reason}")


def _chunks(raw: BinaryIO, decoder: Callable[[], Any], *, step: int) -> Iterator[bytes]:
    """Yield decompressed bytes, about a MiB at a time. Concatenated members are one stream."""
    pending = raw.read(step)
    while pending:
        engine = decoder()
        while not engine.eof:
            needs_input = getattr(engine, "needs_input", True)  # bz2 and lzma keep what they have not used
            if needs_input and not pending:
                pending = raw.read(step)
                if not pending:
                    raise EOFError
            yield engine.decompress(pending, _CHUNK)
            pending = getattr(engine, "unconsumed_tail", b"")
        pending = engine.unused_data or raw.read(step)
        # Tapes and xz pad with zeros after the last member.
        while pending and not pending.strip(b"\0"):
            pending = raw.read(step)
        pending = pending.lstrip(b"\0")


def _decoder(compression: str, file: Path) -> Callable[[], Any]:
    if compression == ".gz":
        return lambda: zlib.decompressobj(zlib.MAX_WBITS | 16)
    if compression == ".bz2":
        return bz2.BZ2Decompressor
    if compression == ".xz":
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_WINDOW)
    try:
        import zstandard
    except ImportError as error:
        raise EnvironmentProblem(f"{file}: reading .zst needs zstandard; pip install 'bottega[data]'") from error
    return lambda: _Zstd(zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj())


@final
class _Zstd:
    """Zstandard's decoder with the interface of the others."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def decompress(self, data: bytes, size: int) -> bytes:
        return bytes(self._engine.decompress(data))

    @property
    def eof(self) -> bool:
        return bool(self._engine.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._engine.unused_data)


def _errors(compression: str) -> tuple[type[Exception], ...]:
    """Return the exceptions a decoder raises on damaged data."""
    if compression != ".zst":
        return zlib.error, lzma.LZMAError, ValueError
    import zstandard

    return zstandard.ZstdError, ValueError
