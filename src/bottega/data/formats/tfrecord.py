"""TFRecord: records with two checksums each, holding tf.train.Example or SequenceExample; plain or gzip over the file.

The protocol buffers are read here, since TensorFlow's own reader would bring all of TensorFlow along.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bottega.config.data import Source
from bottega.data.formats import crc32c
from bottega.data.formats.compression import open_decompressed
from bottega.data.formats.reader import Format, Piece
from bottega.data.records.archive_members import CHUNK, MAX_MEMBER_BYTES, read_up_to
from bottega.data.records.record import BadRecord, Record, Unreadable

HEADER = struct.Struct("<QI")  # length of the data, masked CRC of these 8 bytes; behind the data stands the CRC of it
FLOAT = struct.Struct("<f")
AROUND = HEADER.size + 4
HEADERS_TOGETHER = 1 << 16
"""While pieces are cut, their checksums are made so many at a time."""
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def is_tfrecord(head: bytes) -> bool:
    """Whether a file that begins like this is one: a plausible length with the right checksum of it."""
    if head[:3] == b"\x1f\x8b\x08":
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, HEADER.size)
        except zlib.error:
            return False
    return len(head) >= HEADER.size and _is_header(head[: HEADER.size])


def _is_header(head: bytes) -> bool:
    length, checksum = HEADER.unpack(head)
    return length <= MAX_MEMBER_BYTES and crc32c.mask_crc(crc32c.crc32c(head[:8])) == checksum


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    number = piece.line
    with open_decompressed(piece.file) as stream:
        if piece.start:
            stream.seek(piece.start)
        for offset, data, problem in _records(stream, piece.start, piece.stop):
            number += 1
            key, where = f"{piece.name}:{number}", f"{piece.location}, record {number} at byte {offset}"
            try:
                if problem is not None:
                    raise Unreadable(problem)
                yield Record(key, where, parse_example(data))
            except Unreadable as error:
                yield BadRecord(key, where, str(error))


def list_pieces(file: Path, name: str, source: Source, size: int) -> list[Piece]:
    """A plain file is cut between records, found by their lengths alone."""
    whole = [Piece(file, name)]
    total = file.stat().st_size
    if total <= size:
        return whole
    with open_decompressed(file) as stream:
        if not stream.seekable():
            return whole
        at, count, cuts = 0, 0, [(0, 0)]
        while at < total:
            heads: list[bytes] = []
            starts: list[int] = []
            while at < total and len(heads) < HEADERS_TOGETHER:
                head = stream.read(HEADER.size)
                if len(head) < HEADER.size:
                    break
                heads.append(head)
                starts.append(at)
                at += AROUND + int.from_bytes(head[:8], "little")
                if at >= total:
                    break
                stream.seek(at)
            good = _good_headers(b"".join(heads), np.arange(len(heads)) * HEADER.size)
            for start in starts[:good]:
                if start - cuts[-1][0] >= size:
                    cuts.append((start, count))
                count += 1
            if good < len(heads) or not heads:
                break  # from here on nothing can be found; the last piece says so
    stops = [start for start, _ in cuts[1:]]
    return [Piece(file, name, start, stop, line) for (start, line), stop in zip(cuts, [*stops, None], strict=True)]


def _good_headers(data: bytes, starts: np.ndarray) -> int:
    """How many of the headers at `starts` are right before the first that is not."""
    if not len(starts):
        return 0
    raw = np.frombuffer(data, np.uint8)
    stored = raw[starts[:, None] + np.arange(8, 12)].view("<u4")[:, 0]
    wrong = np.flatnonzero(crc32c.mask_crcs(crc32c.crc32c_of_spans(data, starts, starts + 8)) != stored)
    return int(wrong[0]) if len(wrong) else len(starts)


def _records(stream: BinaryIO, at: int, stop: int | None) -> Iterator[tuple[int, bytes, str | None]]:
    """(offset, data, what is wrong with it), checked some thousands at a time."""
    rest, more = b"", b" "
    while more:
        more = stream.read(CHUNK if stop is None else min(CHUNK, stop - at - len(rest)))
        if rest and more:  # a record larger than what is read at a time
            more += read_up_to(stream, max(0, _needed(rest + more[: HEADER.size]) - len(rest) - len(more)))
        buffer = rest + more
        starts, stops = _spans(buffer)
        good = _good_headers(buffer, starts)
        yield from _checked(buffer, starts[:good], stops[:good], at)
        done = int(stops[good - 1]) + 4 if good else 0
        rest, at = buffer[done:], at + done
        if len(rest) >= HEADER.size and not _is_header(rest[: HEADER.size]):
            length = int.from_bytes(rest[:8], "little")
            yield at, b"", f"its length, {length}, is damaged or above {MAX_MEMBER_BYTES}; what follows cannot be found"
            return
    if rest:
        yield at, b"", "the file ends within it; it was cut off"


def _needed(head: bytes) -> int:
    """The bytes of the record that begins here, if its length can be trusted."""
    if len(head) < HEADER.size or not _is_header(head[: HEADER.size]):
        return 0
    return AROUND + int.from_bytes(head[:8], "little")


def _spans(buffer: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Where the records that are whole in the buffer begin, and where the data of each stops."""
    starts, at, last = [], 0, len(buffer) - AROUND
    while at <= last:
        length = int.from_bytes(buffer[at : at + 8], "little")
        if at + length > last:
            break
        starts.append(at)
        at += length + AROUND
    begin = np.array(starts, np.int64)
    return begin, np.append(begin[1:], at)[: len(begin)] - 4


def _checked(buffer: bytes, starts: np.ndarray, stops: np.ndarray, at: int) -> Iterator[tuple[int, bytes, str | None]]:
    if not len(starts):
        return
    raw = np.frombuffer(buffer, np.uint8)
    stored = raw[stops[:, None] + np.arange(4)].view("<u4")[:, 0]
    right = crc32c.mask_crcs(crc32c.crc32c_of_spans(raw, starts + HEADER.size, stops)) == stored
    for start, end, is_right in zip(starts.tolist(), stops.tolist(), right.tolist(), strict=True):
        problem = None if is_right else "its checksum is wrong: the data are damaged"
        yield at + start, buffer[start + HEADER.size : end], problem


def parse_example(data: bytes) -> dict[str, Any]:
    """The features of an Example, or the context and the feature lists of a SequenceExample."""
    fields: dict[str, Any] = {}
    try:
        for number, start, stop in _messages(data, 0, len(data)):
            if number == 1:
                fields |= _usual(data, start, stop) or _features(data, start, stop)
            elif number == 2:
                for name, low, high in _entries(data, start, stop):
                    steps = [_feature(data, *step) for n, *step in _messages(data, low, high) if n == 1]
                    fields[name] = _sequence(steps)
    except (IndexError, ValueError) as error:
        raise Unreadable("is no tf.train.Example: its protocol buffer is damaged or of another kind") from error
    return _shaped(fields)


def _features(data: bytes, at: int, end: int) -> dict[str, Any]:
    return {name: _value(_feature(data, low, high)) for name, low, high in _entries(data, at, end)}


def _usual(data: bytes, at: int, stop: int) -> dict[str, Any]:
    """The same for features laid out as everybody writes them, and nothing where one is not.

    Ten times as fast as following each field to where it leads, and all the time that reading small records takes.
    """
    fields: dict[str, Any] = {}
    try:
        while at < stop:
            size, start = (data[at + 1], at + 2) if data[at + 1] < 128 else _varint(data, at + 1)
            end = start + size
            length = data[start + 1]
            middle = start + 2 + length
            if end > stop or data[at] != 10 or data[start] != 10 or length > 127 or data[middle] != 18:
                return {}
            size, at = (data[middle + 1], middle + 2) if data[middle + 1] < 128 else _varint(data, middle + 1)
            inner, first = (data[at + 1], at + 2) if data[at + 1] < 128 else _varint(data, at + 1)
            if at + size != end or first + inner != end or inner == 0 or data[first] != 10:
                return {}
            kind = data[at]
            size, at = (data[first + 1], first + 2) if data[first + 1] < 128 else _varint(data, first + 1)
            if at + size != end:
                return {}
            name = data[start + 2 : middle].decode()
            if kind == 26:
                fields[name] = data[at] if size == 1 and data[at] < 128 else _one(_numbers(data[at:end]))
            elif kind == 18:
                floats = data[at:end]
                fields[name] = FLOAT.unpack(floats)[0] if size == 4 else np.frombuffer(floats, "<f4").copy()
            elif kind == 10:
                fields[name] = _text(data[at:end])
            else:
                return {}
            at = end
    except (IndexError, ValueError):
        return {}
    return fields


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    for shift in range(7, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number of more than 10 bytes")


def _messages(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(field number, start, stop) of the fields with a length; all others are passed over."""
    while at < end:
        tag, at = _varint(data, at)
        start, at = _step(data, at, tag & 7)
        if at > end:
            raise ValueError("a field longer than its message")
        if tag & 7 == 2:
            yield tag >> 3, start, at


def _step(data: bytes, at: int, wire: int) -> tuple[int, int]:
    """Where the content of a field begins and where it ends."""
    if wire == 2:
        length, at = _varint(data, at)
        return at, at + length
    if wire == 0:
        return at, _varint(data, at)[1]
    if wire not in (1, 5):
        raise ValueError("a group, or no protocol buffer at all")
    return at, at + (8 if wire == 1 else 4)


def _entries(data: bytes, at: int, end: int) -> Iterator[tuple[str, int, int]]:
    """The entries of a map: name and where the value stands. They may come in any order."""
    for number, start, stop in _messages(data, at, end):
        if number != 1:
            continue
        name, low, high = "", stop, stop
        for part, first, last in _messages(data, start, stop):
            if part == 1:
                name = data[first:last].decode()
            elif part == 2:
                low, high = first, last
        yield name, low, high


def _feature(data: bytes, at: int, end: int) -> list[bytes] | np.ndarray | None:
    """bytes_list 1, float_list 2 or int64_list 3; the last kind counts, and lists of one kind are joined."""
    kind = 0
    parts: list[tuple[int, int]] = []
    for number, start, stop in _messages(data, at, end):
        if number in (1, 2, 3):
            if number != kind:
                kind, parts = number, []
            parts.append((start, stop))
    if kind == 0:
        return None
    if kind == 1:
        return [data[low:high] for part in parts for number, low, high in _messages(data, *part) if number == 1]
    lists = [_floats(data, *part) if kind == 2 else _integers(data, *part) for part in parts]
    return lists[0] if len(lists) == 1 else np.concatenate(lists)


def _floats(data: bytes, at: int, end: int) -> np.ndarray:
    return np.frombuffer(b"".join(_values(data, at, end, 5)), "<f4").astype(np.float32)


def _integers(data: bytes, at: int, end: int) -> np.ndarray:
    return _numbers(b"".join(_values(data, at, end, 0)))


def _numbers(packed: bytes) -> np.ndarray:
    """int64 from numbers of seven bits a byte, the lowest first; the last byte of each is below 128."""
    if packed and packed[-1] > 127:
        raise ValueError("a number that does not end")
    if len(packed) <= 64:
        values, at = [], 0
        while at < len(packed):
            value, at = _varint(packed, at)
            values.append(value & (1 << 64) - 1)
        return np.array(values, np.uint64).view(np.int64)
    raw = np.frombuffer(packed, np.uint8)
    stops = np.flatnonzero(raw < 128) + 1
    starts = np.append(0, stops[:-1])
    sizes = stops - starts
    if sizes.max() > 10:
        raise ValueError("a number of more than 10 bytes")
    out = np.zeros(len(stops), np.uint64)
    for i in range(int(sizes.max())):
        longer = sizes > i
        out[longer] |= (raw[starts[longer] + i] & np.uint8(127)).astype(np.uint64) << np.uint64(7 * i)
    return out.view(np.int64)


def _values(data: bytes, at: int, end: int, wire: int) -> Iterator[bytes]:
    """The numbers of a list, packed or one by one."""
    while at < end:
        tag, at = _varint(data, at)
        start, at = _step(data, at, tag & 7)
        if at > end:
            raise ValueError("a field longer than its message")
        if tag >> 3 == 1 and tag & 7 in (2, wire):
            yield data[start:at]


def _value(feature: list[bytes] | np.ndarray | None) -> Any:
    if isinstance(feature, np.ndarray):
        return _one(feature)
    if feature is None:
        return None
    values = [_text(value) for value in feature]
    if not all(isinstance(value, str) for value in values):
        values = list(feature)
    return values[0] if len(values) == 1 else values


def _one(array: np.ndarray) -> Any:
    return array.item() if len(array) == 1 else array


def _text(value: bytes) -> str | bytes:
    """Text where it can be nothing else: there is one type for both, and a picture is not UTF-8 beyond its first bytes."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value
    return value if CONTROL.search(text) else text


def _sequence(steps: list[list[bytes] | np.ndarray | None]) -> Any:
    """An array [steps, n] where all steps have n numbers, [steps] where each has one; else a list of values."""
    shapes = {(step.dtype, len(step)) if isinstance(step, np.ndarray) else None for step in steps}
    if len(shapes) == 1 and None not in shapes:
        stacked = np.stack([step for step in steps if isinstance(step, np.ndarray)])
        return stacked[:, 0] if stacked.shape[1] == 1 else stacked
    return [_value(step) for step in steps]


def _shaped(fields: dict[str, Any]) -> dict[str, Any]:
    """Numbers that came with a shape, as NAME/shape, are an array of it."""
    for name in [name for name in fields if name.endswith("/shape")]:
        owner = name.removesuffix("/shape")
        value, shape = fields.get(owner), np.atleast_1d(fields[name])
        if not isinstance(value, np.ndarray | int | float) or shape.dtype != np.int64 or shape.ndim != 1:
            continue
        array = np.asarray(value, np.float32 if isinstance(value, float) else None)
        if min(shape, default=0) >= 0 and math.prod(shape.tolist()) == array.size:
            fields[owner] = array.reshape(shape.tolist())
            del fields[name]
    return fields


FORMAT = Format(
    kind="tfrecord",
    suffixes=frozenset((".tfrecord", ".tfrecords", ".tfrecord.gz", ".tfrecords.gz")),
    read=read,
    list_pieces=list_pieces,
)
