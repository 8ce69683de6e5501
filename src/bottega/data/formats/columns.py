"""Parquet and Arrow files, read by row groups and record batches through pyarrow.

Parquet is written with a column for each field, in row groups of about 8 MiB, compressed with zstd. Media are bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.config.data import Source
from bottega.core.errors import DataError, EnvironmentProblem
from bottega.data.formats.compression import open_binary
from bottega.data.formats.reader import Format, Piece
from bottega.data.formats.write import OutputShard, to_json_value
from bottega.data.records.record import BadRecord, Record

# How much of a row group is decoded at a time: a row group of images may have hundreds of MiB.
BATCH_BYTES = 16 << 20
MAX_BATCH_ROWS = 1024

MediumLoader = Callable[[bytes | None, str | None], Any]
"""(bytes, path) of an image or audio column of Hugging Face, either of which may be None, to the value of the field."""


def list_parquet_pieces(file: Path, name: str, source: Source, size: int) -> list[Piece]:
    """Return pieces of consecutive row groups, of about `size` bytes each."""
    with _convert_errors(file), _open_parquet(file) as table:
        meta = table.metadata
        groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
        return _group_pieces(file, name, [(group.num_rows, group.total_byte_size) for group in groups], size)


def read_parquet(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    """Yield the rows of the piece's row groups, in batches of bounded size."""
    with _convert_errors(piece.file), _open_parquet(piece.file) as table:
        meta = table.metadata
        stop = meta.num_row_groups if piece.stop is None else piece.stop
        groups = list(range(piece.start, stop))
        num_rows = sum(meta.row_group(i).num_rows for i in groups)
        if num_rows == 0:
            return
        row_bytes = max(1, sum(meta.row_group(i).total_byte_size for i in groups) // num_rows)
        batch_size = max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // row_bytes))
        yield from _iter_records(piece, table.iter_batches(batch_size=batch_size, row_groups=groups, use_threads=False))


def list_arrow_pieces(file: Path, name: str, source: Source, size: int) -> list[Piece]:
    """Return pieces of consecutive record batches, of about `size` bytes each."""
    sizes = []
    for batch in iter_arrow_batches(file):
        _validate(batch, file)
        sizes.append((batch.num_rows, batch.nbytes))
    return _group_pieces(file, name, sizes, size)


def read_arrow(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    """Yield the rows of the piece's record batches."""
    return _iter_records(piece, iter_arrow_batches(piece.file, piece.start, piece.stop))


def iter_arrow_batches(file: Path, start: int = 0, stop: int | None = None) -> Iterator[Any]:
    """Yield the record batches `start` to `stop` of an Arrow file or stream, memory-mapped, so that other batches are not read."""
    pyarrow = _import_pyarrow(file)
    with _convert_errors(file), pyarrow.memory_map(str(file)) as mapped:
        try:
            table = pyarrow.ipc.open_file(mapped)
        except pyarrow.ArrowInvalid:
            mapped.seek(0)
            for number, batch in enumerate(pyarrow.ipc.open_stream(mapped)):
                if stop is not None and number >= stop:
                    return
                if number >= start:
                    yield batch
            return
        for number in range(start, table.num_record_batches if stop is None else stop):
            yield table.get_batch(number)


def _iter_records(piece: Piece, batches: Iterator[Any]) -> Iterator[Record]:
    row = piece.records_before
    for batch in batches:
        for fields in iter_rows(batch, piece.file):
            row += 1
            yield Record(f"{piece.name}:{row}", f"{piece.location}, row {row}", fields)


def iter_rows(
    batch: Any, file: Path, load_medium: MediumLoader = lambda content, path: content
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a record batch as Python values. `load_medium` loads media columns; by default paths are not opened."""
    names = batch.schema.names
    if len(set(names)) < len(names):
        (repeated, _), *_ = Counter(names).most_common(1)
        raise DataError(f"{file}: two columns are named {repeated!r}; rename one")
    _validate(batch, file, full=True)
    columns = [_to_python_values(column, load_medium) for column in batch.columns]
    for cells in zip(*columns, strict=True):
        yield dict(zip(names, cells, strict=True))


def _validate(batch: Any, file: Path, *, full: bool = False) -> None:
    """Check the offsets of a batch: pyarrow trusts them, and a wrong one reads foreign memory or crashes the process."""
    with _convert_errors(file):
        batch.validate(full=full)


def _to_python_values(column: Any, load_medium: MediumLoader) -> list[Any]:
    import pyarrow

    types = pyarrow.types
    if types.is_timestamp(column.type) and column.type.unit == "ns":
        # Python's datetime has microseconds; for nanoseconds pyarrow would need pandas.
        column = column.cast(pyarrow.timestamp("us", column.type.tz), safe=False)
    values: list[Any] = column.to_pylist()
    value_type = column.type.value_type if types.is_dictionary(column.type) else column.type
    simple_checks = (
        types.is_integer,
        types.is_floating,
        types.is_boolean,
        types.is_null,
        types.is_binary,
        types.is_string,
    )
    large_checks = (types.is_large_binary, types.is_large_string, types.is_fixed_size_binary)
    if any(is_type(value_type) for is_type in (*simple_checks, *large_checks)):
        return values
    return [_to_plain_value(value, load_medium) for value in values]


def _to_plain_value(value: Any, load_medium: MediumLoader) -> Any:
    """Convert times to ISO 8601, durations to seconds and media by `load_medium`, at any depth."""
    if isinstance(value, dict):
        # Hugging Face's layout of images and audio.
        if value.keys() == {"bytes", "path"}:
            return load_medium(value["bytes"], value["path"])
        return {name: _to_plain_value(item, load_medium) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain_value(item, load_medium) for item in value]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value) if isinstance(value, Decimal) else value


def _group_pieces(file: Path, name: str, groups: list[tuple[int, int]], size: int) -> list[Piece]:
    """Join consecutive row groups or record batches, given as (rows, bytes), into pieces of about `size` bytes."""
    pieces: list[Piece] = []
    start = piece_bytes = rows_before = piece_rows = 0
    for number, (num_rows, num_bytes) in enumerate(groups, start=1):
        piece_bytes, piece_rows = piece_bytes + num_bytes, piece_rows + num_rows
        if piece_bytes >= size or number == len(groups):
            pieces.append(Piece(file, name, start, number, rows_before))
            start, piece_bytes, rows_before, piece_rows = number, 0, rows_before + piece_rows, 0
    return pieces


def _import_pyarrow(file: Path) -> Any:
    try:
        import pyarrow.ipc
    except ImportError as error:
        raise EnvironmentProblem(f"{file}: reading it needs pyarrow; pip install 'bottega[data]'") from error
    open_binary(file).close()  # raises our errors if it cannot be opened
    return pyarrow


def _open_parquet(file: Path) -> Any:
    _import_pyarrow(file)
    from pyarrow.parquet import ParquetFile

    return ParquetFile(file)


@contextmanager
def _convert_errors(file: Path) -> Iterator[None]:
    """Turn errors of pyarrow into a DataError of one line."""
    pyarrow = _import_pyarrow(file)
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{file} is damaged or of another format: {reason}") from error


PARQUET = Format(kind="parquet", suffixes=frozenset((".parquet",)), read=read_parquet, list_pieces=list_parquet_pieces)
ARROW = Format(kind="arrow", suffixes=frozenset((".arrow", ".feather")), read=read_arrow, list_pieces=list_arrow_pieces)


ROW_GROUP_BYTES = 8 << 20


@final
class ParquetShard(OutputShard):
    """Rows as Parquet; the first row group fixes the columns and their types."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise EnvironmentProblem("writing parquet needs pyarrow; pip install 'bottega[data]'") from error
        self.path = path
        self._arrow: Any = pyarrow
        self._file = path.open("wb")
        self._schema: Any = None
        self._writer: Any = None
        self._rows: list[Record] = []
        self._pending_bytes = 0

    def add(self, record: Record, name: str) -> None:
        self._rows.append(record)
        self._pending_bytes += sum(map(_estimate_bytes, record.fields.values()))
        self.size = self._file.tell() + self._pending_bytes
        if self._pending_bytes >= ROW_GROUP_BYTES:
            self._write_row_group()

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            if self._rows:
                self._write_row_group()
        finally:
            if self._writer is not None:
                self._writer.close()
            self._file.close()

    def _write_row_group(self) -> None:
        rows, self._rows, self._pending_bytes = self._rows, [], 0
        names = list(dict.fromkeys(name for row in rows for name in row.fields))
        new_names = [] if self._schema is None else sorted(set(names) - set(self._schema.names))
        if new_names:
            row = next(row for row in rows if new_names[0] in row.fields)
            raise DataError(
                f"{row.where}: field {new_names[0]!r} is not in the first rows, which fix the columns of parquet; add it to them"
            )
        columns = {
            name: self._build_column(name, rows) for name in (names if self._schema is None else self._schema.names)
        }
        table = self._arrow.table(columns)
        try:
            if self._writer is None:
                self._schema = table.schema
                self._writer = self._arrow.parquet.ParquetWriter(self._file, self._schema, compression="zstd")
            self._writer.write_table(table)
        except self._arrow.ArrowException as error:
            raise DataError(f"{rows[0].where} and {len(rows) - 1} more: {_join_lines(error)}") from error

    def _build_column(self, name: str, rows: list[Record]) -> Any:
        values = [row.fields.get(name) for row in rows]
        arrow_type = None if self._schema is None else self._schema.field(name).type
        if arrow_type is None:
            first_value = next((value for value in values if value is not None), None)
            arrow_type = self._infer_nested_type(first_value) if isinstance(first_value, np.ndarray) else None
        try:
            return self._arrow.array([_to_stored_value(value) for value in values], type=arrow_type)
        except (self._arrow.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"{rows[0].where} and {len(rows) - 1} more: field {name!r} has values of several types: {_join_lines(error)}"
            ) from error

    def _infer_nested_type(self, array: np.ndarray) -> Any:
        arrow_type = self._arrow.from_numpy_dtype(array.dtype) if array.dtype.kind in "biuf" else None
        for _ in range(array.ndim if arrow_type is not None else 0):
            arrow_type = self._arrow.list_(arrow_type)
        return arrow_type


def _to_stored_value(value: Any) -> Any:
    return value.read_bytes() if isinstance(value, Path) else to_json_value(value)


def _estimate_bytes(value: Any) -> int:
    """Return the approximate size of a value, to know when a row group is full."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Path):
        return value.stat().st_size
    if isinstance(value, dict):
        return sum(map(_estimate_bytes, value.values()))
    return sum(map(_estimate_bytes, value)) if isinstance(value, list | tuple) else 8


def _join_lines(error: Exception) -> str:
    return " ".join(str(error).split())
