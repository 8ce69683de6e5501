"""WebDataset: tar archives whose consecutive members of one key are a sample. They are streamed, never extracted.

The headers are parsed here: Python's tarfile is slower by half an order, takes what a PAX header asks for in memory, and
accepts links, devices and two members of one name. Everything that two readers could understand differently is refused.
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
    CHUNK,
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
"""ImageNet in one archive has 2.6 million. Their keys are remembered, some 70 bytes each."""
MAX_EXTENSION = 1 << 16
"""Of a long name or a PAX header; tarfile has no limit."""
BLOCK = 512
END = bytes(BLOCK)
WRAPPINGS = ("npy", "txt")

FILE = frozenset((b"0", b"\0", b"7"))
FOLDER = b"5"
NO_BODY = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe"}
LONG_NAME, LONG_LINK, SPARSE, PAX_GLOBAL, NO_END = b"L", b"K", b"S", b"g", b""
PAX = frozenset((b"x", b"X", PAX_GLOBAL))
EXTENSIONS = PAX | {LONG_NAME, LONG_LINK}


class Member(NamedTuple):
    """One entry that is no folder."""

    name: str
    key: str
    field: str
    start: int
    """Of its first header; names that do not fit one have further ones in front."""
    offset: int
    size: int
    problem: str | None
    data_fingerprint: bytes | None
    """Where it was asked for and there is no problem."""


class IndexedSample(NamedTuple):
    """Where the members of a sample are, for os.pread."""

    key: str
    fields: dict[str, tuple[int, int]]
    """Offset and size of each."""
    start: int
    problem: str | None
    """Why it must not be read: see `read`."""


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    """The samples of an archive in its order. What makes the rest unfindable, such as a cut, is a DataError."""
    with open_decompressed(piece.file) as stream:
        try:
            if piece.start:
                stream.seek(piece.start)
            for sample in _samples(_members(stream, piece, bodies=True)):
                yield _record(sample, piece)
            if piece.stop is None:
                yield from _after(stream, piece)
        except Unreadable as error:
            raise DataError(f"{piece.file}: {error}") from error


def index_archive(path: Path) -> list[IndexedSample]:
    """All samples of a plain archive by their place in it; only headers are read."""
    return list(_index(Piece(path, path.name)))


def list_pieces(file: Path, name: str, source: Source, size: int) -> list[Piece]:
    """A plain archive is cut between samples. One with anything odd stays whole: its reader then says what, in order."""
    if file.stat().st_size <= size:
        return [Piece(file, name)]
    starts = [0]
    try:
        for sample in _index(Piece(file, name)):
            if sample.problem is not None:
                return [Piece(file, name)]
            if sample.start - starts[-1] >= size:
                starts.append(sample.start)
    except DataError:
        return [Piece(file, name)]
    return [Piece(file, name, start, stop) for start, stop in zip(starts, [*starts[1:], None], strict=True)]


def _index(piece: Piece) -> Iterator[IndexedSample]:
    with open_decompressed(piece.file) as stream:
        if not stream.seekable():
            raise DataError(f"{piece.file} is compressed, so its members cannot be read one by one; unpack it to .tar")
        try:
            for sample in _samples(_members(stream, piece, bodies=False)):
                yield IndexedSample(sample.key, sample.fields, sample.start, sample.problem)
        except Unreadable as error:
            raise DataError(f"{piece.file}: {error}") from error


class _Sample:
    """What is gathered of one key: the values of its fields, or where they are."""

    __slots__ = ("bytes", "fields", "is_refused", "key", "problem", "start")

    def __init__(self, key: str, start: int) -> None:
        self.key, self.start = key, start
        self.fields: dict[str, Any] = {}
        self.problem: str | None = None
        self.is_refused = False
        self.bytes = 0


def _record(sample: _Sample, piece: Piece) -> Record | BadRecord:
    key = sample.key if sample.key.isprintable() else ascii(sample.key)[1:-1]
    where = f"{piece.location}, sample {key}"
    if sample.problem is not None:
        return BadRecord(f"{piece.name}:{key}", where, sample.problem, sample.is_refused)
    return Record(f"{piece.name}:{key}", where, _unfolded(sample.fields))


def _unfolded(members: dict[str, Any]) -> dict[str, Any]:
    """The fields that were packed. An array or a text is a member video.npy or source.txt, so that its kind is told;
    values without a suffix of their own stand together in .json. A member comes before what another one holds."""
    fields: dict[str, Any] = {}
    for name, found in members.items():
        stem, _, suffix = name.rpartition(".")
        is_taken = not stem or stem in members or stem in fields
        fields[name if is_taken or suffix not in WRAPPINGS else stem] = found
    together = members.get("json")
    return {**together, **fields} if isinstance(together, dict) else fields


def _samples(members: Iterator[Member]) -> Iterator[_Sample]:
    """Consecutive members of one key."""
    sample: _Sample | None = None
    # Hashes and not the keys, which may be a kilobyte each: two of four million agree with odds of 1 in 10 million.
    seen: set[int] = set()
    for count, member in enumerate(members):
        if count >= MAX_MEMBERS:
            raise Unreadable(f"has more than {MAX_MEMBERS} members; pack it in several archives")
        if sample is None or member.key != sample.key:
            if sample is not None:
                yield sample
            sample = _Sample(member.key, member.start)
            if hash(member.key) in seen:
                sample.problem = f"member {member.name!r}: its sample came earlier already; pack it sorted by name"
                sample.is_refused = True
            seen.add(hash(member.key))
        sample.bytes += member.size
        problem = member.problem or _add(sample, member)
        sample.is_refused |= member.problem is not None
        if problem is not None and sample.problem is None:
            sample.problem = f"member {member.name!r}: {problem}"
        if sample.problem is not None:
            sample.fields = {}
    if sample is not None:
        yield sample


def _add(sample: _Sample, member: Member) -> str | None:
    """Put a member into its sample, or say why not."""
    if member.field in sample.fields:
        sample.is_refused = True  # readers that check the first and use the last have been fooled so
        return "a second member of this name"
    if sample.bytes > MAX_MEMBER_BYTES:
        return f"makes its sample {sample.bytes} bytes; one may have {MAX_MEMBER_BYTES}"
    if member.data_fingerprint is None:
        sample.fields[member.field] = member.offset, member.size
        return None
    try:
        sample.fields[member.field] = decode_member(member.field, member.data_fingerprint)
    except Unreadable as error:
        sample.is_refused |= isinstance(error, UnsafeContent)
        return str(error)
    return None


def _members(stream: BinaryIO, piece: Piece, *, bodies: bool) -> Iterator[Member]:
    at, stop = piece.start, piece.stop
    total = os.fstat(stream.fileno()).st_size if stream.seekable() else None
    while stop is None or at < stop:
        start = at
        entry = _entry(stream, start)
        if entry is None:
            return
        at, raw, kind, length, problem = entry
        name = raw.decode(errors="backslashreplace")
        is_folder = kind == FOLDER or (kind == b"\0" and raw.endswith(b"/"))
        if is_folder or kind in NO_BODY:
            length = 0
        after = at + length + -length % BLOCK
        if total is not None and after > total and kind != NO_END:
            raise Unreadable(f"member {name!r} says it has {length} bytes, more than there are; it was cut off")
        key, field = split_member_name(normalize_path(name))
        problem = problem or _problem(raw, name, kind, is_folder)
        is_left_out = problem is None and (is_folder or _is_note(key))
        if problem is None and not is_left_out and not is_supported_field(field):
            problem = "not a kind of data that is read here"
        if problem is None and length > MAX_MEMBER_BYTES:
            problem = f"{length} bytes; a sample may have {MAX_MEMBER_BYTES}"
        data = read_up_to(stream, length) if bodies and problem is None and not is_left_out else None
        if data is not None and len(data) < length:
            raise Unreadable(f"ends within member {name!r}; it was cut off")
        if not is_left_out:
            yield Member(name, key, field, start, at, length, problem, data)
        if kind == NO_END:
            return
        _go(stream, at + len(data or b""), after, name)
        at = after


def _is_note(key: str) -> bool:
    """What file managers leave behind (.DS_Store, ._a.jpg), and WebDataset's notes about a shard (__info__.json)."""
    base = key.rpartition("/")[2]
    return not base or (len(base) > 4 and base.startswith("__") and base.endswith("__"))


def _entry(stream: BinaryIO, start: int) -> tuple[int, bytes, bytes, int, str | None] | None:
    """Where the body of the entry at `start` begins, its name, type and size, and what is wrong; None at the end."""
    at, name, size, problem = start, None, None, None
    while True:
        header = stream.read(BLOCK)
        if header == END or not header:
            if at > start or (not header and start == 0):
                raise Unreadable("is empty" if not at else f"ends after the header at offset {start}; it was cut off")
            return None if header else (at, b"(end)", NO_END, 0, "the archive has no end mark; was it cut off?")
        kind, length = _checked(header, at)
        at += BLOCK
        if kind == SPARSE:
            raise Unreadable(f"member {_name(header)!r} is a sparse file; pack it without --sparse")
        if kind not in EXTENSIONS:
            return at, _name(header) if name is None else name, kind, length if size is None else size, problem
        body, at = _extension(stream, length, at)
        records = {b"path": body.partition(b"\0")[0]} if kind == LONG_NAME else _pax(body, at) if kind in PAX else {}
        if kind == PAX_GLOBAL and records.keys() & {b"path", b"size"}:
            raise Unreadable("has a name or a size for all members at once (a global PAX header)")
        if b"path" in records:
            problem = problem if name is None else "has two long names, of which readers choose differently"
            name = records[b"path"]
        if b"size" in records:
            size = _number(records[b"size"], 10, at)
        if any(key.startswith(b"GNU.sparse.") for key in records):
            problem = "a sparse file; pack it without --sparse"


def _problem(raw: bytes, text: str, kind: bytes, is_folder: bool) -> str | None:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "its name is not UTF-8"
    if kind in NO_BODY:
        return f"is {NO_BODY[kind]}"
    if not is_folder and kind not in FILE:
        return f"is of a kind that is not known here ({kind!r})"
    return find_name_problem(text)


def _go(stream: BinaryIO, at: int, to: int, name: str) -> None:
    if stream.seekable():
        stream.seek(to)
        return
    while at < to:
        part = stream.read(min(to - at, CHUNK))
        if not part:
            raise Unreadable(f"ends within member {name!r}; it was cut off")
        at += len(part)


def _checked(header: bytes, at: int) -> tuple[bytes, int]:
    """The type and size of a header whose checksum is right. Some old programs summed signed bytes."""
    if len(header) < BLOCK:
        raise Unreadable(f"ends within the header at offset {at}; it was cut off")
    wanted = _number(header[148:156].partition(b"\0")[0], 8, at)
    # Adler-32 begins with the sum modulo 65521, which 256 bytes cannot reach: five times as fast as sum().
    found = (adler32(header[:256], 0) & 0xFFFF) + (adler32(header[256:], 0) & 0xFFFF) - sum(header[148:156]) + 256
    if found != wanted:
        negative = header[:148] + header[156:]
        if found - 256 * sum(byte > 127 for byte in negative) != wanted:
            raise Unreadable(f"has no tar header at offset {at}, or a damaged one (its checksum is wrong)")
    size = header[124:136]
    if size[0] == 0x80:
        return header[156:157], int.from_bytes(size[1:], "big")
    return header[156:157], _number(size.partition(b"\0")[0], 8, at)


def _number(digits: bytes, base: int, at: int) -> int:
    digits = digits.strip()
    if not digits:
        return 0
    if not digits.isdigit() or len(digits) > 20:
        raise Unreadable(f"has no tar header at offset {at}, or a damaged one ({digits[:20]!r} is no number)")
    try:
        return int(digits, base)
    except ValueError as error:
        raise Unreadable(f"has no tar header at offset {at}, or a damaged one ({digits!r} is not octal)") from error


def _name(header: bytes) -> bytes:
    name = header[:100].partition(b"\0")[0]
    # GNU keeps times where POSIX has the front part of a long name.
    if header[257:263] == b"ustar\0" and header[345]:
        return header[345:500].partition(b"\0")[0] + b"/" + name
    return name


def _extension(stream: BinaryIO, length: int, at: int) -> tuple[bytes, int]:
    if length > MAX_EXTENSION:
        raise Unreadable(f"has a header of {length} bytes at offset {at - BLOCK}; at most {MAX_EXTENSION} are read")
    padded = length + -length % BLOCK
    body = stream.read(padded)
    if len(body) < padded:
        raise Unreadable(f"ends within the header at offset {at - BLOCK}; it was cut off")
    return body[:length], at + padded


def _pax(body: bytes, at: int) -> dict[bytes, bytes]:
    """Lines of `length key=value`, where the length counts the whole line."""
    records: dict[bytes, bytes] = {}
    place = 0
    while place < len(body) and body[place]:
        space = body.find(b" ", place, place + 8)
        digits = body[place:space] if space != -1 else b""
        end = place + int(digits) if digits.isdigit() else 0
        key, equals, found = body[space + 1 : max(end - 1, 0)].partition(b"=")
        if not space < end <= len(body) or body[end - 1 : end] != b"\n" or not equals:
            raise Unreadable(f"has a damaged PAX header before offset {at}")
        records[key] = found
        place = end
    return records


def _after(stream: BinaryIO, piece: Piece) -> Iterator[BadRecord]:
    """Zeros fill the last blocks. Anything else would be passed over in silence, as by tar itself."""
    while part := stream.read(CHUNK):
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
