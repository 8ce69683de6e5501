"""WebDataset: tar archives in which consecutive members of one key are a sample. They are streamed, never extracted.

The headers are parsed here: Python's tarfile is about three times slower, allocates whatever size a PAX header claims, and
accepts links, devices and two members of one name. Anything that two readers could interpret differently is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from zlib import adler32

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats.compression import open_decompressed
from bottega.data.formats.reader import Format, Piece
from bottega.data.records.archive_members import (
    CHUNK_BYTES,
    MAX_MEMBER_BYTES,
    decode_member,
    find_name_problem,
    is_supported_field,
    normalize_path,
    read_up_to,
    split_member_name,
)
from bottega.data.records.record import BadRecord, Record, Unreadable, UnsafeContent

MAX_MEMBERS = 4_000_000
"""ImageNet in one archive has 2.6 million members. The hashes of all keys are in memory, some 70 bytes each."""
MAX_EXTENSION_BYTES = 1 << 16
"""Maximum size of a long name or a PAX header; tarfile has no limit."""
BLOCK_BYTES = 512
END_BLOCK = bytes(BLOCK_BYTES)
TYPE_SUFFIXES = ("npy", "txt")

FILE_TYPES = frozenset((b"0", b"\0", b"7"))
FOLDER_TYPE = b"5"
TYPES_WITHOUT_BODY = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe"}
LONG_NAME, LONG_LINK, SPARSE, PAX_GLOBAL, NO_END_MARK = b"L", b"K", b"S", b"g", b""
PAX_TYPES = frozenset((b"x", b"X", PAX_GLOBAL))
EXTENSION_TYPES = PAX_TYPES | {LONG_NAME, LONG_LINK}


class Member(NamedTuple):
    """One entry of an archive, folders excepted."""

    name: str
    key: str
    field: str
    start: int
    """Offset of its first header: a long name is stored in extension headers in front of its own."""
    offset: int
    """Offset of its content."""
    size: int
    problem: str | None
    data: bytes | None
    """The content, if it was requested and there is no problem."""


class IndexedSample(NamedTuple):
    """Offsets of the members of a sample, for os.pread."""

    key: str
    fields: dict[str, tuple[int, int]]
    """Field to (offset, size) of its content."""
    start: int
    """Offset of the first header of its first member."""
    problem: str | None
    """Why the sample must not be read, or None; see `read`."""


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    """Yield the samples of an archive in order. Raises DataError if the rest cannot be located, as in a truncated archive."""
    with open_decompressed(piece.file) as stream:
        try:
            if piece.start:
                stream.seek(piece.start)
            for sample in _group_samples(_iter_members(stream, piece, reads_bodies=True)):
                yield _make_record(sample, piece)
            if piece.stop is None:
                yield from _check_trailing_data(stream, piece)
        except Unreadable as error:
            raise DataError(f"{piece.file}: {error}") from error


def index_archive(path: Path) -> list[IndexedSample]:
    """Return the offsets of all samples of an uncompressed archive; only headers are read."""
    return list(_iter_index(Piece(path, path.name)))


def list_pieces(file: Path, name: str, source: Source, size: int) -> list[Piece]:
    """Cut an uncompressed archive between samples. An archive with a problem stays one piece: `read` reports it in order."""
    if file.stat().st_size <= size:
        return [Piece(file, name)]
    starts = [0]
    try:
        for sample in _iter_index(Piece(file, name)):
            if sample.problem is not None:
                return [Piece(file, name)]
            if sample.start - starts[-1] >= size:
                starts.append(sample.start)
    except DataError:
        return [Piece(file, name)]
    return [Piece(file, name, start, stop) for start, stop in zip(starts, [*starts[1:], None], strict=True)]


def _iter_index(piece: Piece) -> Iterator[IndexedSample]:
    with open_decompressed(piece.file) as stream:
        if not stream.seekable():
            raise DataError(
                f"{piece.file} is compressed, so its members cannot be read one by one; decompress it to .tar"
            )
        try:
            for sample in _group_samples(_iter_members(stream, piece, reads_bodies=False)):
                yield IndexedSample(sample.key, sample.fields, sample.start, sample.problem)
        except Unreadable as error:
            raise DataError(f"{piece.file}: {error}") from error


class _Sample:
    """The members of one key: the values of its fields, or their (offset, size)."""

    __slots__ = ("fields", "is_unsafe", "key", "num_bytes", "problem", "start")

    def __init__(self, key: str, start: int) -> None:
        self.key, self.start = key, start
        self.fields: dict[str, Any] = {}
        self.problem: str | None = None
        self.is_unsafe = False
        self.num_bytes = 0


def _make_record(sample: _Sample, piece: Piece) -> Record | BadRecord:
    key = sample.key if sample.key.isprintable() else ascii(sample.key)[1:-1]
    where = f"{piece.location}, sample {key}"
    if sample.problem is not None:
        return BadRecord(f"{piece.name}:{key}", where, sample.problem, sample.is_unsafe)
    return Record(f"{piece.name}:{key}", where, _merge_members(sample.fields))


def _merge_members(members: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a sample, undoing `tar_write.encode_members`.

    Arrays and texts lose the suffix that marks their type (video.npy, source.txt); other plain values come from .json,
    where a member of the same name takes precedence.
    """
    fields: dict[str, Any] = {}
    for name, value in members.items():
        stem, _, suffix = name.rpartition(".")
        is_taken = not stem or stem in members or stem in fields
        fields[name if is_taken or suffix not in TYPE_SUFFIXES else stem] = value
    values = members.get("json")
    return {**values, **fields} if isinstance(values, dict) else fields


def _group_samples(members: Iterator[Member]) -> Iterator[_Sample]:
    """Group consecutive members of one key."""
    sample: _Sample | None = None
    # Hashes rather than keys of up to a kilobyte: a collision among four million has odds of 1 in 10 million.
    key_hashes: set[int] = set()
    for count, member in enumerate(members):
        if count >= MAX_MEMBERS:
            raise Unreadable(f"has more than {MAX_MEMBERS} members; pack it in several archives")
        if sample is None or member.key != sample.key:
            if sample is not None:
                yield sample
            sample = _Sample(member.key, member.start)
            if hash(member.key) in key_hashes:
                sample.problem = f"member {member.name!r}: the members of its sample are not consecutive; pack the archive sorted by name"
                sample.is_unsafe = True
            key_hashes.add(hash(member.key))
        sample.num_bytes += member.size
        problem = member.problem or _add_member(sample, member)
        sample.is_unsafe |= member.problem is not None
        if problem is not None and sample.problem is None:
            sample.problem = f"member {member.name!r}: {problem}"
        if sample.problem is not None:
            sample.fields = {}
    if sample is not None:
        yield sample


def _add_member(sample: _Sample, member: Member) -> str | None:
    """Add a member to its sample; return the reason if that is not possible, or None."""
    if member.field in sample.fields:
        sample.is_unsafe = True  # an attack on readers that check the first and use the last
        return "a second member of this name"
    if sample.num_bytes > MAX_MEMBER_BYTES:
        return f"makes its sample {sample.num_bytes} bytes; at most {MAX_MEMBER_BYTES} are allowed"
    if member.data is None:
        sample.fields[member.field] = member.offset, member.size
        return None
    try:
        sample.fields[member.field] = decode_member(member.field, member.data)
    except Unreadable as error:
        sample.is_unsafe |= isinstance(error, UnsafeContent)
        return str(error)
    return None


def _iter_members(stream: BinaryIO, piece: Piece, *, reads_bodies: bool) -> Iterator[Member]:
    position, stop = piece.start, piece.stop
    total = os.fstat(stream.fileno()).st_size if stream.seekable() else None
    while stop is None or position < stop:
        start = position
        entry = _read_entry(stream, start)
        if entry is None:
            return
        position, raw_name, kind, length, problem = entry
        name = raw_name.decode(errors="backslashreplace")
        is_folder = kind == FOLDER_TYPE or (kind == b"\0" and raw_name.endswith(b"/"))
        if is_folder or kind in TYPES_WITHOUT_BODY:
            length = 0
        next_start = position + length + -length % BLOCK_BYTES
        if total is not None and next_start > total and kind != NO_END_MARK:
            raise Unreadable(f"is truncated: member {name!r} states {length} bytes, more than remain")
        key, field = split_member_name(normalize_path(name))
        problem = problem or _find_problem(raw_name, name, kind, is_folder)
        is_skipped = problem is None and (is_folder or _is_metadata_member(key))
        if problem is None and not is_skipped and not is_supported_field(field):
            problem = "its suffix is not a supported kind of data"
        if problem is None and length > MAX_MEMBER_BYTES:
            problem = f"has {length} bytes; a sample may have at most {MAX_MEMBER_BYTES}"
        data = read_up_to(stream, length) if reads_bodies and problem is None and not is_skipped else None
        if data is not None and len(data) < length:
            raise Unreadable(f"is truncated: it ends within member {name!r}")
        if not is_skipped:
            yield Member(name, key, field, start, position, length, problem, data)
        if kind == NO_END_MARK:
            return
        _skip_to(stream, position + len(data or b""), next_start, name)
        position = next_start


def _is_metadata_member(key: str) -> bool:
    """Return whether a member is not data: a file manager's (.DS_Store, ._a.jpg), or WebDataset's on a shard (__info__.json)."""
    base = key.rpartition("/")[2]
    return not base or (len(base) > 4 and base.startswith("__") and base.endswith("__"))


def _read_entry(stream: BinaryIO, start: int) -> tuple[int, bytes, bytes, int, str | None] | None:
    """Return (offset of the body, name, type, size, problem) of the entry at `start`; None at the end of the archive."""
    at, name, size, problem = start, None, None, None
    while True:
        header = stream.read(BLOCK_BYTES)
        if header == END_BLOCK or not header:
            if at > start or (not header and start == 0):
                raise Unreadable("is empty" if not at else f"is truncated: it ends after the header at offset {start}")
            return (
                None if header else (at, b"(end)", NO_END_MARK, 0, "the archive has no end mark; it may be truncated")
            )
        kind, length = _parse_header(header, at)
        at += BLOCK_BYTES
        if kind == SPARSE:
            raise Unreadable(f"member {_parse_name(header)!r} is a sparse file; pack it without --sparse")
        if kind not in EXTENSION_TYPES:
            return at, _parse_name(header) if name is None else name, kind, length if size is None else size, problem
        body, at = _read_extension(stream, length, at)
        records = (
            {b"path": body.partition(b"\0")[0]}
            if kind == LONG_NAME
            else _parse_pax(body, at)
            if kind in PAX_TYPES
            else {}
        )
        if kind == PAX_GLOBAL and records.keys() & {b"path", b"size"}:
            raise Unreadable("has a global PAX header with one name or size for all members")
        if b"path" in records:
            problem = problem if name is None else "has two long names, and readers differ in which one they use"
            name = records[b"path"]
        if b"size" in records:
            size = _parse_number(records[b"size"], 10, at)
        if any(key.startswith(b"GNU.sparse.") for key in records):
            problem = "a sparse file; pack it without --sparse"


def _find_problem(raw_name: bytes, name: str, kind: bytes, is_folder: bool) -> str | None:
    try:
        raw_name.decode()
    except UnicodeDecodeError:
        return "its name is not UTF-8"
    if kind in TYPES_WITHOUT_BODY:
        return f"is {TYPES_WITHOUT_BODY[kind]}"
    if not is_folder and kind not in FILE_TYPES:
        return f"is of the unknown type {kind!r}"
    return find_name_problem(name)


def _skip_to(stream: BinaryIO, position: int, target: int, name: str) -> None:
    if stream.seekable():
        stream.seek(target)
        return
    while position < target:
        part = stream.read(min(target - position, CHUNK_BYTES))
        if not part:
            raise Unreadable(f"is truncated: it ends within member {name!r}")
        position += len(part)


def _parse_header(header: bytes, offset: int) -> tuple[bytes, int]:
    """Return type and size of a header, after checking its checksum. Some old programs summed signed bytes."""
    if len(header) < BLOCK_BYTES:
        raise Unreadable(f"is truncated: it ends within the header at offset {offset}")
    stored_checksum = _parse_number(header[148:156].partition(b"\0")[0], 8, offset)
    # The low half of Adler-32 is the sum modulo 65521, which 256 bytes cannot reach: five times as fast as sum().
    computed_checksum = (
        (adler32(header[:256], 0) & 0xFFFF) + (adler32(header[256:], 0) & 0xFFFF) - sum(header[148:156]) + 256
    )
    if computed_checksum != stored_checksum:
        summed_bytes = header[:148] + header[156:]
        if computed_checksum - 256 * sum(byte > 127 for byte in summed_bytes) != stored_checksum:
            raise Unreadable(f"has no tar header at offset {offset}, or a damaged one (its checksum is wrong)")
    size = header[124:136]
    if size[0] == 0x80:
        return header[156:157], int.from_bytes(size[1:], "big")
    return header[156:157], _parse_number(size.partition(b"\0")[0], 8, offset)


def _parse_number(digits: bytes, base: int, at: int) -> int:
    digits = digits.strip()
    if not digits:
        return 0
    if not digits.isdigit() or len(digits) > 20:
        raise Unreadable(f"has no tar header at offset {at}, or a damaged one ({digits[:20]!r} is not a number)")
    try:
        return int(digits, base)
    except ValueError as error:
        raise Unreadable(f"has no tar header at offset {at}, or a damaged one ({digits!r} is not octal)") from error


def _parse_name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    # GNU has times where POSIX has the prefix of a long name.
    if header[257:263] == b"ustar\0" and header[345]:
        return header[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _read_extension(stream: BinaryIO, length: int, at: int) -> tuple[bytes, int]:
    if length > MAX_EXTENSION_BYTES:
        raise Unreadable(
            f"has a header of {length} bytes at offset {at - BLOCK_BYTES}; at most {MAX_EXTENSION_BYTES} are allowed"
        )
    padded_length = length + -length % BLOCK_BYTES
    body = stream.read(padded_length)
    if len(body) < padded_length:
        raise Unreadable(f"is truncated: it ends within the header at offset {at - BLOCK_BYTES}")
    return body[:length], at + padded_length


def _parse_pax(body: bytes, at: int) -> dict[bytes, bytes]:
    """Parse lines of `length key=value`, where the length counts the whole line."""
    records: dict[bytes, bytes] = {}
    position = 0
    while position < len(body) and body[position]:
        space = body.find(b" ", position, position + 8)
        digits = body[position:space] if space != -1 else b""
        end = position + int(digits) if digits.isdigit() else 0
        key, equals, value = body[space + 1 : max(end - 1, 0)].partition(b"=")
        if not space < end <= len(body) or body[end - 1 : end] != b"\n" or not equals:
            raise Unreadable(f"has a damaged PAX header before offset {at}")
        records[key] = value
        position = end
    return records


def _check_trailing_data(stream: BinaryIO, piece: Piece) -> Iterator[BadRecord]:
    """Yield a bad record if anything but zeros follows the end mark; tar itself ignores it silently."""
    while part := stream.read(CHUNK_BYTES):
        if part.count(0) < len(part):
            reason = "further data after the end of the archive; join archives with tar --concatenate"
            yield BadRecord(f"{piece.name}:(end)", piece.location, reason)
            return


FORMAT = Format(
    kind="webdataset",
    suffixes=frozenset((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")),
    read=read,
    list_pieces=list_pieces,
    is_media=True,
)
