"""Safe decoding of archive members: allowed names, sizes and types of value.

Nothing is extracted to disk and nothing is executed. Only suffixes on the list of supported ones are read: a pickle or a
module in a shard is a way to run code, and a list of forbidden suffixes would always miss one.
"""

from __future__ import annotations

import ast
import io
import json
import math
import posixpath
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from bottega.data.records.record import Unreadable, UnsafeContent

MAX_MEMBER_BYTES = 1 << 30
"""Maximum size of one member, sample or record; checked before anything is allocated."""
MAX_RATIO = 1_000
"""Maximum compression ratio of a zip member. Deflate reaches about 1,000 on zeros."""
ALWAYS_ALLOWED_BYTES = 64 << 20
"""Size a zip member may have whatever its ratio: a few black images compress as well as a bomb."""
MAX_ZIP_MEMBERS = 10_000
MAX_JSON_BYTES = 64 << 20
"""A list of small numbers takes twenty times its text in memory."""
MAX_HEADER_BYTES = 10_000
"""Maximum header of an array file, as in numpy: the header is a Python literal that is parsed."""
CHUNK_BYTES = 1 << 20
MAX_NAME_BYTES = 1024

# Exceptions of zipfile for damaged files, by experiment: it has no common class for them.
ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, RuntimeError, ValueError)

IMAGE_SUFFIXES = frozenset(["jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "pgm"])
AUDIO_SUFFIXES = frozenset(["wav", "flac", "ogg", "oga", "mp3", "opus", "m4a", "aac"])
VIDEO_SUFFIXES = frozenset(["mp4", "webm", "mkv", "avi", "mov", "m4v"])
MEDIA_SUFFIXES = IMAGE_SUFFIXES | AUDIO_SUFFIXES | VIDEO_SUFFIXES
TEXT_SUFFIXES = frozenset(
    ("txt", "text", "caption", "transcript", "transcription", "lab", "md", "html", "xml", "yaml", "yml")
)
TEXT_SUFFIXES |= {"csv", "tsv", "jsonl", "srt", "vtt"}
INTEGER_SUFFIXES = frozenset(["cls", "index", "inx", "id"])
SUPPORTED_SUFFIXES = MEDIA_SUFFIXES | TEXT_SUFFIXES | INTEGER_SUFFIXES | {"json", "npy", "npz"}

CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
SIMPLE_DTYPE = re.compile(r"[<>|=]?[A-Za-z?][0-9]{0,6}")
INTEGER = re.compile(rb"\s*[+-]?[0-9]{1,18}\s*")


def find_name_problem(name: str) -> str | None:
    """Return why a member name is unsafe, or None. We never extract members, but others who unpack the archive would."""
    if CONTROL_CHARACTERS.search(name):
        return "its name has a control character"
    if len(name.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
        return f"its name is longer than {MAX_NAME_BYTES} bytes"
    if name.startswith(("/", "\\")) or name[1:2] == ":":
        return "its name is an absolute path"
    if ".." in name.replace("\\", "/").split("/"):
        return "its name leads out of the archive (..)"
    return None


def normalize_path(name: str) -> str:
    """Return the normal form of a path: ./a//b and a/b are the same file."""
    return posixpath.normpath(name) if "./" in name or "//" in name else name


def split_member_name(name: str) -> tuple[str, str]:
    """Split a member name into key and field: a/0001.seg.png is the field seg.png of a/0001; without a dot the field is empty."""
    folder, slash, base = name.rpartition("/")
    stem, _, field = base.partition(".")
    return folder + slash + stem, field.lower()


def is_supported_field(field: str) -> bool:
    """Return whether fields of this name can be decoded."""
    return field.rpartition(".")[2] in SUPPORTED_SUFFIXES


def decode_member(field: str, data: bytes) -> Any:
    """Decode the bytes of a member by the last suffix of its field. Raises Unreadable if they are damaged."""
    suffix = field.rpartition(".")[2]
    if suffix in MEDIA_SUFFIXES:
        return data
    if suffix in TEXT_SUFFIXES:
        return decode_text(data)
    if suffix in INTEGER_SUFFIXES:
        if not INTEGER.fullmatch(data):
            raise Unreadable(f"is not an integer: {data[:20]!r}")
        return int(data)
    if suffix == "json":
        return parse_json(data)
    if suffix == "npy":
        return parse_npy(data)
    if suffix == "npz":
        return parse_npz(data)
    raise UnsafeContent("its suffix is not a supported kind of data")


def decode_text(data: bytes) -> str:
    """Decode UTF-8 text without NUL bytes."""
    nul = data.find(b"\0")
    if nul != -1:
        raise Unreadable(f"is not text: it has a NUL byte at offset {nul}")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Unreadable(f"is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from error


def parse_json(data: bytes) -> Any:
    """Parse JSON without NaN and without lone surrogates, which cannot be encoded."""
    if len(data) > MAX_JSON_BYTES:
        raise Unreadable(f"is JSON of {len(data)} bytes; at most {MAX_JSON_BYTES} are allowed")
    try:
        value = json.loads(decode_text(data), parse_constant=_refuse_constant)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        raise Unreadable("is not valid JSON: it has an unpaired surrogate") from error
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"is not valid JSON: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def parse_npy(data: bytes) -> np.ndarray:
    """Parse a .npy file of numbers or text."""
    stream = io.BytesIO(data)
    dtype, shape, is_fortran = read_npy_header(stream, len(data))
    flat = np.frombuffer(data, dtype, math.prod(shape), stream.tell())
    return flat.reshape(shape, order="F" if is_fortran else "C").copy()


def read_npy_header(stream: BinaryIO, size: int) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Return the dtype, the shape, and whether the order is Fortran's, of the .npy file at the stream's position.

    The stream is left at the first value. `size` is the number of bytes to the end, which must match the header: numpy's
    own reader allocates whatever a header claims, and retries headers of Python 2 with warnings and errors of its own.
    """
    head = stream.read(8)
    length_bytes = {b"\1\0": 2, b"\2\0": 4, b"\3\0": 4}.get(head[6:8], 0)
    length = int.from_bytes(stream.read(length_bytes), "little")
    if head[:6] != b"\x93NUMPY" or not 0 < length <= MAX_HEADER_BYTES:
        raise Unreadable("is not an array file, or one of an unknown version")
    try:
        fields = ast.literal_eval(stream.read(length).decode("latin-1" if length_bytes == 2 else "utf-8").strip())
        shape, is_fortran, descr = fields["shape"], bool(fields["fortran_order"]), fields["descr"]
        dtype = np.dtype(descr) if isinstance(descr, str) and SIMPLE_DTYPE.fullmatch(descr) else None
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError, MemoryError) as error:
        raise Unreadable("is not an array file: its header is damaged") from error
    if dtype is not None and dtype.hasobject:
        raise UnsafeContent("is an array of Python objects, which are pickles and could run code; save numbers or text")
    if dtype is None or dtype.kind not in "biufcSU":
        raise Unreadable(f"is an array of {str(descr)[:40]}; only numbers and text are supported")
    if not isinstance(shape, tuple) or not all(type(axis) is int and axis >= 0 for axis in shape):
        raise Unreadable("is not an array file: its shape is damaged")
    needed_bytes, available_bytes = dtype.itemsize * math.prod(shape), size - (8 + length_bytes + length)
    if dtype.itemsize == 0 or needed_bytes != available_bytes:
        raise Unreadable(
            f"is damaged: its header states {dtype} of shape {shape}, {needed_bytes} bytes, but it has {available_bytes}"
        )
    return dtype, shape, is_fortran


def parse_npz(data: bytes) -> dict[str, np.ndarray]:
    """Parse a .npz archive."""
    with open_zip(io.BytesIO(data)) as archive:
        return {
            info.filename.removesuffix(".npy"): read_zipped_array(archive, info) for info in list_zipped_arrays(archive)
        }


def read_zipped_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """Read one .npy member of an archive."""
    if info.file_size > MAX_MEMBER_BYTES:
        raise Unreadable(f"member {info.filename} has {info.file_size} bytes; at most {MAX_MEMBER_BYTES} are allowed")
    try:
        return parse_npy(archive.read(info))
    except ZIP_ERRORS as error:
        raise Unreadable(f"member {info.filename} is damaged: {error}") from error
    except Unreadable as error:
        raise Unreadable(f"member {info.filename} {error}") from error


def open_zip(file: Path | io.BytesIO) -> zipfile.ZipFile:
    """Open a zip archive; raise Unreadable if it is damaged."""
    try:
        return zipfile.ZipFile(file)
    except ZIP_ERRORS as error:
        raise Unreadable(f"is not an npz file: {error}") from error


def list_zipped_arrays(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the members of an npz file, all of which must be arrays; sizes are checked before decompression."""
    infos = archive.infolist()
    names = [info.filename for info in infos]
    if len(infos) > MAX_ZIP_MEMBERS or len(set(names)) < len(names):
        raise Unreadable(f"has more than {MAX_ZIP_MEMBERS} members, or two with the same name")
    for info in infos:
        problem = find_name_problem(info.filename)
        if problem is None and not info.filename.endswith(".npy"):
            problem = "is not an array; an npz file contains .npy members"
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            problem = "is encrypted or compressed by an unusual method; save it with numpy.savez_compressed"
        if info.file_size > max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * info.compress_size):
            problem = f"has {info.compress_size} bytes that decompress to {info.file_size}, like a zip bomb"
        if problem is not None:
            raise Unreadable(f"member {info.filename!r}: {problem}")
    return infos


MEDIA_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpg"),
    (b"GIF8", "gif"),
    (b"fLaC", "flac"),
    (b"OggS", "ogg"),
    (b"ID3", "mp3"),
    (b"\xff\xfb", "mp3"),
    (b"\x1aE\xdf\xa3", "mkv"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
)
RIFF_SUFFIXES = {b"WAVE": "wav", b"WEBP": "webp", b"AVI ": "avi"}


def detect_media_suffix(data: bytes) -> str | None:
    """Return the file suffix of encoded media by their first bytes, or None."""
    if data[:4] == b"RIFF":
        return RIFF_SUFFIXES.get(data[8:12])
    if data[4:8] == b"ftyp":
        return {b"M4A ": "m4a", b"qt  ": "mov"}.get(data[8:12], "mp4")
    return next((suffix for start, suffix in MEDIA_SIGNATURES if data.startswith(start)), None)


def read_up_to(stream: BinaryIO, size: int) -> bytes:
    """Read `size` bytes, or fewer at the end. Memory grows with the data, not with the size that a header claims."""
    if size <= CHUNK_BYTES:
        return stream.read(size)
    parts = []
    while size and (part := stream.read(min(size, CHUNK_BYTES))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
