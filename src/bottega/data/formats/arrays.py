"""NumPy arrays: .npy files, folders of them, and .npz archives; the first axis is the row. Pickles are refused.

Uncompressed arrays are memory-mapped. Arrays of a compressed .npz are streamed, a few rows at a time, so that
their size does not matter.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats.compression import open_binary
from bottega.data.formats.reader import Format, Piece, make_printable
from bottega.data.records.archive_members import (
    MAX_MEMBER_BYTES,
    ZIP_ERRORS,
    list_zipped_arrays,
    open_zip,
    read_npy_header,
    read_zipped_array,
)
from bottega.data.records.record import BadRecord, Record, Unreadable

LOCAL_HEADER = struct.Struct("<26xHH")
"""Local header of a zip member: the lengths of its name and its extra field. The name, the extra field and the data follow."""


class Array(NamedTuple):
    """Header of one array and the file its values are in."""

    name: str
    file: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool
    offset: int | None
    """Offset of its values in the file; None if they are compressed."""
    info: zipfile.ZipInfo | None = None
    """Member of the .npz archive that the values are decompressed from; None if they are not compressed."""

    @property
    def row_bytes(self) -> int:
        """Size of one row in bytes."""
        return self.dtype.itemsize * math.prod(self.shape[1:])


def list_pieces(file: Path, name: str, source: Source, size: int) -> list[Piece]:
    """Return ranges of rows. A folder of .npy files is one table whose fields are named after the files."""
    if source.path is not None and file.suffix.lower() == ".npy" and Path(source.path).expanduser() == file.parent:
        # This is called for each file of the folder; the first one stands for the table.
        if file != _list_columns(file.parent)[0]:
            return []
        file, name = file.parent, make_printable(file.parent.name)
    arrays = _open_arrays(file, source)
    if any(array.offset is None for array in arrays):
        return [Piece(file, name)]
    total = arrays[0].shape[0]
    rows_per_piece = max(1, size // sum(array.row_bytes for array in arrays))
    return [Piece(file, name, start, min(start + rows_per_piece, total)) for start in range(0, total, rows_per_piece)]


def read(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    """Yield records with a field for each array: a number, a text, or an array. Rows are counted from 0."""
    arrays = _open_arrays(piece.file, source)
    start, stop = piece.start, arrays[0].shape[0] if piece.stop is None else piece.stop
    with ExitStack() as stack:
        archive = None
        if any(array.offset is None for array in arrays):
            archive = stack.enter_context(open_zip(piece.file))
        try:
            columns = [_iter_column(array, start, stop, archive) for array in arrays]
            for row in range(start, stop):
                fields = {array.name: next(column) for array, column in zip(arrays, columns, strict=True)}
                yield Record(f"{piece.name}:{row}", f"{piece.location}, row {row}", fields)
        except Unreadable as error:
            raise DataError(f"{piece.file} {error}") from error


def _iter_column(array: Array, start: int, stop: int, archive: zipfile.ZipFile | None) -> Iterator[Any]:
    if archive is None or array.info is None:
        order: Literal["C", "F"] = "F" if array.is_fortran else "C"
        if start == stop:
            return iter(())  # an empty array cannot be mapped
        mapped = np.memmap(array.file, array.dtype, "r", array.offset or 0, array.shape, order)
        return _iter_rows(np.asarray(mapped), start, stop)
    if array.is_fortran:
        return _iter_rows(read_zipped_array(archive, array.info), start, stop)
    return _stream_rows(archive, array.info, array, stop)


def _iter_rows(values: np.ndarray, start: int, stop: int) -> Iterator[Any]:
    native_dtype = values.dtype.newbyteorder("=")
    for row in range(start, stop):
        yield values[row].item() if values.ndim == 1 else np.array(values[row], native_dtype)


def _stream_rows(archive: zipfile.ZipFile, info: zipfile.ZipInfo, array: Array, stop: int) -> Iterator[Any]:
    rows_per_read = max(1, (1 << 16) // array.row_bytes)
    with archive.open(info) as stream:
        read_npy_header(stream, info.file_size)  # type: ignore[arg-type]
        for row in range(0, stop, rows_per_read):
            count = min(rows_per_read, stop - row)
            try:
                data = stream.read(count * array.row_bytes)
            except ZIP_ERRORS as error:
                raise Unreadable(f"is damaged: member {info.filename}: {error}") from error
            if len(data) < count * array.row_bytes:
                raise Unreadable(f"is damaged: member {info.filename} is truncated")
            yield from _iter_rows(np.frombuffer(data, array.dtype).reshape(count, *array.shape[1:]), 0, count)


def _list_columns(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() == ".npy")


def _open_arrays(file: Path, source: Source) -> list[Array]:
    """Return the arrays of a table; raise DataError unless all have rows, and the same number of them."""
    try:
        if file.is_dir():
            arrays = [_read_npy_array(path, path.stem) for path in _list_columns(file)]
        elif file.suffix.lower() == ".npz":
            arrays = _read_npz_arrays(file)
        else:
            arrays = [_read_npy_array(file, source.field if isinstance(source.field, str) else "array")]
    except Unreadable as error:
        raise DataError(f"{file} {error}") from error
    if not arrays:
        raise DataError(f"{file} contains no arrays")
    for array in arrays:
        if not array.shape or not 0 < array.row_bytes <= MAX_MEMBER_BYTES:
            description = f"{array.name!r} has shape {array.shape} of {array.dtype}"
            raise DataError(
                f"{file}: {description}; the first axis must index rows, each of 1 to {MAX_MEMBER_BYTES} bytes"
            )
    if len({array.shape[0] for array in arrays}) > 1:
        lengths = ", ".join(f"{array.name} {array.shape[0]}" for array in arrays)
        raise DataError(f"{file}: the arrays must be equally long along the first axis, the row ({lengths})")
    return arrays


def _read_npy_array(file: Path, name: str) -> Array:
    with open_binary(file) as stream:
        try:
            dtype, shape, is_fortran = read_npy_header(stream, os.fstat(stream.fileno()).st_size)
        except Unreadable as error:
            raise DataError(f"{file} {error}") from error
        return Array(name, file, dtype, shape, is_fortran, stream.tell())


def _read_npz_arrays(file: Path) -> list[Array]:
    open_binary(file).close()
    arrays = []
    with open_zip(file) as archive, open_binary(file) as raw:
        for info in list_zipped_arrays(archive):
            name = info.filename.removesuffix(".npy")
            try:
                if info.compress_type == zipfile.ZIP_STORED:
                    raw.seek(info.header_offset)
                    local_header = raw.read(30)
                    if len(local_header) < 30 or local_header[:4] != b"PK\3\4":
                        raise Unreadable("has no header at the offset that the archive gives")
                    raw.seek(sum(LOCAL_HEADER.unpack(local_header)), os.SEEK_CUR)
                    npy_start = raw.tell()
                    size = min(info.file_size, max(0, os.fstat(raw.fileno()).st_size - npy_start))
                    dtype, shape, is_fortran = read_npy_header(raw, size)
                    arrays.append(Array(name, file, dtype, shape, is_fortran, raw.tell()))
                else:
                    with archive.open(info) as stream:
                        head = io.BytesIO(stream.read(16384))
                    dtype, shape, is_fortran = read_npy_header(head, info.file_size)
                    arrays.append(Array(name, file, dtype, shape, is_fortran, None, info))
            except ZIP_ERRORS as error:
                raise Unreadable(f"is damaged: member {info.filename}: {error}") from error
            except Unreadable as error:
                raise Unreadable(f"cannot be read: member {info.filename} {error}") from error
    return arrays


FORMAT = Format(kind="numpy", suffixes=frozenset((".npy", ".npz")), read=read, list_pieces=list_pieces)
