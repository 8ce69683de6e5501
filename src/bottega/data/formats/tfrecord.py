"""TFRecord: records with two checksums each, holding tf.train.Example or SequenceExample; uncompressed or gzip.

The protocol buffers are parsed here, since TensorFlow's own reader would require all of TensorFlow.
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
from bottega.data.formats.compression import is_compressed, open_decompressed
from bottega.data.formats.reader import Format, Piece
from bottega.data.records.archive_members import CHUNK_BYTES, MAX_MEMBER_BYTES, read_up_to
from bottega.data.records.record import BadRecord, Record, Unreadable

HEADER = struct.Struct("<QI")  # length of the data, masked CRC of these 8 bytes; the data and their CRC follow
FLOAT = struct.Struct("<f")
OVERHEAD_BYTES = HEADER.size + 4
HEADERS_PER_BLOCK = 1 << 16  # while a file is cut into pieces, the checksums of this many headers are computed at once
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def is_tfrecord(head: bytes) -> bool:
    """Return whether a file begins like a TFRecord: a plausible length and its checksum."""
    if head[:3] == b"\x1f\x8b\x08":
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, HEADER.size)
        except zlib.error:
            return False
    return len(head) >= HEADER.size and _is_valid_header(head[: HEADER.size])


def _is_valid_header(head: bytes) -> bool:
    length, checksum = HEADER.unpack(head)
    return length <= MAX_MEMBER_BYTES and crc32c.mask_crc(crc32c.crc32c(head[:8])) == checksum


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    """Yield the examples of the piece, with the byte offset as their location."""
    number = piece.records_before
    with open_decompressed(piece.file) as stream:
        if piece.start:
            stream.seek(piece.start)
        for offset, data, problem in _read_records(stream, piece.start, piece.stop):
            number += 1
            key, where = f"{piece.name}:{number}", f"{piece.location}, record {number} at byte {offset}"
            try:
                if problem is not None:
                    raise Unreadable(problem)
                yield Record(key, where, parse_example(data))
            except Unreadable as error:
                yield BadRecord(key, where, str(error))


def list_pieces(file: Path, name: str, source: Source, size: int) -> list[Piece]:
    """Cut between records, found by following their lengths; a compressed file is one piece."""
    total = file.stat().st_size
    if total <= size or is_compressed(file):
        return [Piece(file, name)]
    with open_decompressed(file) as stream:
        position, count, cuts = 0, 0, [(0, 0)]  # a cut is (offset, number of records before it)
        while position < total:
            heads: list[bytes] = []
            starts: list[int] = []
            while position < total and len(heads) < HEADERS_PER_BLOCK:
                head = stream.read(HEADER.size)
                if len(head) < HEADER.size:
                    break
                heads.append(head)
                starts.append(position)
                position += OVERHEAD_BYTES + int.from_bytes(head[:8], "little")
                if position >= total:
                    break
                stream.seek(position)
            num_valid = _count_valid_headers(b"".join(heads), np.arange(len(heads)) * HEADER.size)
            for start in starts[:num_valid]:
                if start - cuts[-1][0] >= size:
                    cuts.append((start, count))
                count += 1
            if num_valid < len(heads) or not heads:
                break  # the records after this one cannot be located; reading the last piece reports it
    stops = [start for start, _ in cuts[1:]]
    return [Piece(file, name, start, stop, n) for (start, n), stop in zip(cuts, [*stops, None], strict=True)]


def _count_valid_headers(data: bytes, starts: np.ndarray) -> int:
    """Return the number of headers at `starts` before the first with a wrong checksum."""
    if not len(starts):
        return 0
    raw = np.frombuffer(data, np.uint8)
    stored_checksums = raw[starts[:, None] + np.arange(8, 12)].view("<u4")[:, 0]
    checksums = crc32c.mask_crcs(crc32c.crc32c_of_spans(data, starts, starts + 8))
    wrong_indices = np.flatnonzero(checksums != stored_checksums)
    return int(wrong_indices[0]) if len(wrong_indices) else len(starts)


def _read_records(stream: BinaryIO, offset: int, stop: int | None) -> Iterator[tuple[int, bytes, str | None]]:
    """Yield (offset, data, problem or None) of each record; checksums are computed for thousands of records at a time."""
    rest, chunk = b"", b" "
    while chunk:
        chunk = stream.read(CHUNK_BYTES if stop is None else min(CHUNK_BYTES, stop - offset - len(rest)))
        if rest and chunk:  # a record larger than one chunk
            chunk += read_up_to(stream, max(0, _get_record_size(rest + chunk[: HEADER.size]) - len(rest) - len(chunk)))
        buffer = rest + chunk
        starts, stops = _find_records(buffer)
        num_valid = _count_valid_headers(buffer, starts)
        yield from _check_data(buffer, starts[:num_valid], stops[:num_valid], offset)
        num_parsed_bytes = int(stops[num_valid - 1]) + 4 if num_valid else 0
        rest, offset = buffer[num_parsed_bytes:], offset + num_parsed_bytes
        if len(rest) >= HEADER.size and not _is_valid_header(rest[: HEADER.size]):
            length = int.from_bytes(rest[:8], "little")
            problem = (
                f"its length, {length}, is damaged or above {MAX_MEMBER_BYTES}; the records after it cannot be located"
            )
            yield offset, b"", problem
            return
    if rest:
        yield offset, b"", "the file is truncated: it ends within this record"


def _get_record_size(head: bytes) -> int:
    """Return the size of the record that begins here; 0 if its header is incomplete or damaged."""
    if len(head) < HEADER.size or not _is_valid_header(head[: HEADER.size]):
        return 0
    return OVERHEAD_BYTES + int.from_bytes(head[:8], "little")


def _find_records(buffer: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets at which the complete records of a buffer begin, and those at which their data end."""
    starts, position, last_start = [], 0, len(buffer) - OVERHEAD_BYTES
    while position <= last_start:
        length = int.from_bytes(buffer[position : position + 8], "little")
        if position + length > last_start:
            break
        starts.append(position)
        position += length + OVERHEAD_BYTES
    start_array = np.array(starts, np.int64)
    return start_array, np.append(start_array[1:], position)[: len(start_array)] - 4


def _check_data(
    buffer: bytes, starts: np.ndarray, stops: np.ndarray, offset: int
) -> Iterator[tuple[int, bytes, str | None]]:
    if not len(starts):
        return
    raw = np.frombuffer(buffer, np.uint8)
    stored_checksums = raw[stops[:, None] + np.arange(4)].view("<u4")[:, 0]
    matches = crc32c.mask_crcs(crc32c.crc32c_of_spans(raw, starts + HEADER.size, stops)) == stored_checksums
    for start, end, is_intact in zip(starts.tolist(), stops.tolist(), matches.tolist(), strict=True):
        problem = None if is_intact else "is damaged: its checksum is wrong"
        yield offset + start, buffer[start + HEADER.size : end], problem


def parse_example(data: bytes) -> dict[str, Any]:
    """Parse the features of an Example, or the context and the feature lists of a SequenceExample."""
    fields: dict[str, Any] = {}
    try:
        for number, start, stop in _iter_messages(data, 0, len(data)):
            if number == 1:
                fields |= _parse_common_layout(data, start, stop) or _parse_features(data, start, stop)
            elif number == 2:
                for name, low, high in _iter_entries(data, start, stop):
                    steps = [_parse_feature(data, *step) for n, *step in _iter_messages(data, low, high) if n == 1]
                    fields[name] = _stack_steps(steps)
    except (IndexError, ValueError) as error:
        raise Unreadable("is not a tf.train.Example: its protocol buffer is damaged or of another type") from error
    return _apply_shapes(fields)


def _parse_features(data: bytes, at: int, end: int) -> dict[str, Any]:
    return {name: _to_field_value(_parse_feature(data, low, high)) for name, low, high in _iter_entries(data, at, end)}


def _parse_common_layout(data: bytes, position: int, stop: int) -> dict[str, Any]:
    """Parse features in the layout that all common writers use; return an empty dictionary if any feature differs.

    This is ten times as fast as general parsing, which dominates the time of reading small records. A tag is the field
    number times 8 plus the wire type 2: 10 is field 1, 18 is field 2, 26 is field 3. An entry of the map has a name and a
    feature, the feature has one list, and the list has its packed numbers or its bytes.
    """
    fields: dict[str, Any] = {}
    try:
        while position < stop:
            entry_size, entry_start = _read_size(data, position + 1)
            end = entry_start + entry_size
            name_length = data[entry_start + 1]
            feature_tag = entry_start + 2 + name_length
            tags = (data[position], data[entry_start], data[feature_tag])
            if end > stop or name_length > 127 or tags != (10, 10, 18):
                return {}
            feature_size, feature_start = _read_size(data, feature_tag + 1)
            list_size, list_start = _read_size(data, feature_start + 1)
            is_one_list = feature_start + feature_size == end and list_start + list_size == end
            if not is_one_list or list_size == 0 or data[list_start] != 10:
                return {}
            kind_tag = data[feature_start]
            values_size, values_start = _read_size(data, list_start + 1)
            if values_start + values_size != end:
                return {}
            name, values = data[entry_start + 2 : feature_tag].decode(), data[values_start:end]
            if kind_tag == 26:
                is_single_byte = values_size == 1 and values[0] < 128
                fields[name] = values[0] if is_single_byte else _unwrap_scalar(_decode_varints(values))
            elif kind_tag == 18:
                fields[name] = FLOAT.unpack(values)[0] if values_size == 4 else np.frombuffer(values, "<f4").copy()
            elif kind_tag == 10:
                fields[name] = _decode_if_text(values)
            else:
                return {}
            position = end
    except (IndexError, ValueError):
        return {}
    return fields


def _read_size(data: bytes, at: int) -> tuple[int, int]:
    """Return the size of a field and the offset at which its content begins; most sizes are below 128, which is one byte."""
    return (data[at], at + 1) if data[at] < 128 else _decode_varint(data, at)


def _decode_varint(data: bytes, at: int) -> tuple[int, int]:
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


def _iter_messages(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (field number, start, stop) of the length-delimited fields; fields of other wire types are skipped."""
    while at < end:
        tag, at = _decode_varint(data, at)
        start, at = _find_field_range(data, at, tag & 7)
        if at > end:
            raise ValueError("a field longer than its message")
        if tag & 7 == 2:
            yield tag >> 3, start, at


def _find_field_range(data: bytes, at: int, wire_type: int) -> tuple[int, int]:
    """Return the offsets at which the content of a field of this wire type begins and ends."""
    if wire_type == 2:
        length, at = _decode_varint(data, at)
        return at, at + length
    if wire_type == 0:
        return at, _decode_varint(data, at)[1]
    if wire_type not in (1, 5):
        raise ValueError("a group, or not a protocol buffer")
    return at, at + (8 if wire_type == 1 else 4)


def _iter_entries(data: bytes, at: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Yield (name, start, stop of the value) of the entries of a map, whose two fields may come in any order."""
    for number, start, stop in _iter_messages(data, at, end):
        if number != 1:
            continue
        name, low, high = "", stop, stop
        for entry_field, first, last in _iter_messages(data, start, stop):
            if entry_field == 1:
                name = data[first:last].decode()
            elif entry_field == 2:
                low, high = first, last
        yield name, low, high


def _parse_feature(data: bytes, at: int, end: int) -> list[bytes] | np.ndarray | None:
    """Parse bytes_list 1, float_list 2 or int64_list 3.

    If there are lists of several kinds, only the last kind counts. Lists of the same kind are joined.
    """
    kind = 0
    parts: list[tuple[int, int]] = []
    for number, start, stop in _iter_messages(data, at, end):
        if number in (1, 2, 3):
            if number != kind:
                kind, parts = number, []
            parts.append((start, stop))
    if kind == 0:
        return None
    if kind == 1:
        return [data[low:high] for part in parts for number, low, high in _iter_messages(data, *part) if number == 1]
    lists = [_parse_floats(data, *part) if kind == 2 else _parse_integers(data, *part) for part in parts]
    return lists[0] if len(lists) == 1 else np.concatenate(lists)


def _parse_floats(data: bytes, at: int, end: int) -> np.ndarray:
    return np.frombuffer(b"".join(_iter_encoded_numbers(data, at, end, 5)), "<f4").astype(np.float32)


def _parse_integers(data: bytes, at: int, end: int) -> np.ndarray:
    return _decode_varints(b"".join(_iter_encoded_numbers(data, at, end, 0)))


def _decode_varints(packed: bytes) -> np.ndarray:
    """Decode varints to int64: seven bits per byte, lowest first; the last byte of each is below 128."""
    if packed and packed[-1] > 127:
        raise ValueError("a truncated number")
    if len(packed) <= 64:
        values, at = [], 0
        while at < len(packed):
            value, at = _decode_varint(packed, at)
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
        is_longer = sizes > i
        out[is_longer] |= (raw[starts[is_longer] + i] & np.uint8(127)).astype(np.uint64) << np.uint64(7 * i)
    return out.view(np.int64)


def _iter_encoded_numbers(data: bytes, at: int, end: int, wire_type: int) -> Iterator[bytes]:
    """Yield the bytes of the numbers of a list: of all at once if it is packed, otherwise of one number per field."""
    while at < end:
        tag, at = _decode_varint(data, at)
        start, at = _find_field_range(data, at, tag & 7)
        if at > end:
            raise ValueError("a field longer than its message")
        if tag >> 3 == 1 and tag & 7 in (2, wire_type):
            yield data[start:at]


def _to_field_value(feature: list[bytes] | np.ndarray | None) -> Any:
    if isinstance(feature, np.ndarray):
        return _unwrap_scalar(feature)
    if feature is None:
        return None
    texts = [_decode_if_text(value) for value in feature]
    values = texts if all(isinstance(text, str) for text in texts) else feature
    return values[0] if len(values) == 1 else values


def _unwrap_scalar(array: np.ndarray) -> Any:
    return array.item() if len(array) == 1 else array


def _decode_if_text(value: bytes) -> str | bytes:
    """Return text if the bytes are UTF-8 without control characters: an Example has one type for text and bytes."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value
    return value if CONTROL_CHARACTERS.search(text) else text


def _stack_steps(steps: list[list[bytes] | np.ndarray | None]) -> Any:
    """Return an array (steps, n) if all steps have n numbers, (steps,) if each has one; otherwise a list of values."""
    arrays = [step for step in steps if isinstance(step, np.ndarray)]
    if len(arrays) == len(steps) and len({(array.dtype, len(array)) for array in arrays}) == 1:
        stacked = np.stack(arrays)
        return stacked[:, 0] if stacked.shape[1] == 1 else stacked
    return [_to_field_value(step) for step in steps]


def _apply_shapes(fields: dict[str, Any]) -> dict[str, Any]:
    """Reshape arrays whose shape is stored beside them as NAME/shape."""
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
