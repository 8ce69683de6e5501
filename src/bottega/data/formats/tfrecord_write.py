"""Write TFRecord shards of tf.train.Example without TensorFlow.

Example has three types: integers are int64 and other numbers float32; text is bytes in UTF-8. An array of several axes is
a flat list with its shape beside it, as NAME/shape; a value of any other type, such as a dictionary, is JSON text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.core.errors import DataError
from bottega.data.formats import crc32c
from bottega.data.formats.write import OutputShard, encode_json, raise_field_error, to_json_value
from bottega.data.records.record import Record

# Bytes whose checksums are computed at once.
MAX_PENDING_BYTES = 1 << 20


@final
class TFRecordShard(OutputShard):
    """One TFRecord file being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._pending: list[bytes] = []
        self._pending_bytes = 0

    def add(self, record: Record, name: str) -> None:
        data = encode_example(record)
        self._pending.append(data)
        self._pending_bytes += len(data)
        self.size += len(data) + 16
        if self._pending_bytes >= MAX_PENDING_BYTES:
            self._write_pending()

    def close(self) -> None:
        if not self._file.closed:
            self._write_pending()
            self._file.close()

    def _write_pending(self) -> None:
        lengths = np.array([len(data) for data in self._pending], "<u8")
        encoded_lengths = lengths.tobytes()
        starts = np.arange(len(lengths)) * 8
        length_checksums = (
            crc32c.mask_crcs(crc32c.crc32c_of_spans(encoded_lengths, starts, starts + 8)).astype("<u4").tobytes()
        )
        stops = np.cumsum(lengths.astype(np.int64))
        all_data = b"".join(self._pending)
        data_checksums = crc32c.mask_crcs(crc32c.crc32c_of_spans(all_data, stops - lengths.astype(np.int64), stops))
        encoded_checksums = data_checksums.astype("<u4").tobytes()
        for i, data in enumerate(self._pending):
            self._file.write(encoded_lengths[8 * i : 8 * i + 8] + length_checksums[4 * i : 4 * i + 4])
            self._file.write(data)
            self._file.write(encoded_checksums[4 * i : 4 * i + 4])
        self._pending, self._pending_bytes = [], 0


def encode_example(record: Record) -> bytes:
    """Encode a record as tf.train.Example."""
    entries = []
    for name, value in record.fields.items():
        try:
            for field, feature in _encode_features(name, value, record):
                entries.append(_encode_field(1, _encode_field(1, field.encode()) + _encode_field(2, feature)))
        except (UnicodeEncodeError, OverflowError) as error:
            raise DataError(
                f"{record.where}: field {name!r} cannot be stored in a TFRecord ({error}); integers must fit in 64 bits and "
                "text must be valid Unicode"
            ) from error
    return _encode_field(1, b"".join(entries))


def _encode_features(name: str, value: Any, record: Record) -> list[tuple[str, bytes]]:
    """Return the features of a value: one, two if it has a shape, none for None."""
    if value is None:
        return []
    if isinstance(value, Path):
        value = value.read_bytes()
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufSU":
            raise_field_error(
                record, name, f"is an array of {value.dtype}; TFRecord can store integers, float32 and bytes"
            )
        has_shape = value.ndim != 1 or value.size == 1
        shape = [(f"{name}/shape", _encode_array(np.array(value.shape)))] if has_shape else []
        return [(name, _encode_array(value.reshape(-1))), *shape]
    if isinstance(value, list | tuple):
        value = to_json_value(value)
        types = {type(item) for item in value}
        if types <= {str, bytes}:
            return [(name, _encode_bytes_list(value))]
        if types <= {int, bool, float}:
            return [(name, _encode_array(np.array(value, np.float32 if float in types else np.int64)))]
    elif isinstance(value, str | bytes):
        return [(name, _encode_bytes_list([value]))]
    elif isinstance(value, int | float):
        return [(name, _encode_array(np.array([value], np.float32 if isinstance(value, float) else np.int64)))]
    return [(name, _encode_bytes_list([encode_json(value, record, name)]))]


def _encode_array(values: np.ndarray) -> bytes:
    if values.dtype.kind in "SU":
        return _encode_bytes_list(values.tolist())
    if values.dtype.kind == "f":
        packed, number = values.astype("<f4").tobytes(), 2
    else:
        if values.dtype == np.uint64 and values.max(initial=0) >= 1 << 63:
            raise OverflowError("a number exceeds int64")
        packed, number = _encode_varints(values.astype(np.int64).view(np.uint64)), 3
    return _encode_field(number, _encode_field(1, packed) if packed else b"")


def _encode_bytes_list(values: list[str | bytes]) -> bytes:
    return _encode_field(
        1, b"".join(_encode_field(1, value.encode() if isinstance(value, str) else value) for value in values)
    )


def _encode_field(number: int, data: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + _encode_varint(len(data)) + data


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _encode_varints(values: np.ndarray) -> bytes:
    """Encode varints: seven bits per byte, lowest first; all but the last byte of each have the top bit set."""
    sizes = np.ones(len(values), np.int64)
    for i in range(1, 10):
        sizes += values >= np.uint64(1 << 7 * i)
    stops = np.cumsum(sizes)
    out = np.zeros(int(sizes.sum()), np.uint8)
    for i in range(int(sizes.max(initial=0))):
        is_longer = sizes > i
        low_bits = (values[is_longer] >> np.uint64(7 * i)).astype(np.uint8) & np.uint8(127)
        out[stops[is_longer] - sizes[is_longer] + i] = low_bits | np.where(sizes[is_longer] > i + 1, 128, 0).astype(
            np.uint8
        )
    return out.tobytes()
