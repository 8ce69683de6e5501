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

# How much of a row group is decoded at a time: groups of images are hundreds of MiB.
BATCH_BYTES = 16 << 20
BATCH_ROWS = 1024

MediumLoader = Callable[[bytes | None, str | None], Any]
"""(bytes, path) of an image or audio column of Hugging Face, either of which may be None, to the value of the field."""


def list_parquet_pieces(file: Path, name: str, source: Source, size: int) -> list[Piece]:
    """Return runs of row groups of about `size` bytes."""
    with _reading(file), _parquet(file) as table:
        meta = table.metadata
        groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
        return _grouped(file, name, [(group.num_rows, group.total_byte_size) for group in groups], size)


def read_parquet(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    """Yield the rows of the piece's row groups, in batches of bounded size."""
    with _reading(piece.file), _parquet(piece.file) as table:
        meta = table.metadata
        stop = meta.num_row_groups if piece.stop is None else piece.stop
        groups = list(range(piece.start, stop))
        rows = sum(meta.row_group(i).num_rows for i in groups)
        if rows == 0:
            return
        row_bytes = max(1, sum(meta.row_group(i).total_byte_size for i in groups) // rows)
        at_once = max(1, min(BATCH_ROWS, BATCH_BYTES // row_bytes))
        yield from _iterate_records(piece, table.iter_batches(batch_size=at_once, row_groups=groups, use_threads=False))


def list_arrow_pieces(file: Path, name: str, source: Source, size: int) -> list[Piece]:
    """Return runs of record batches of about `size` bytes."""
    sizes = []
    for batch in iter_arrow_batches(file):
        _validate(batch, file)
        sizes.append((batch.num_rows, batch.nbytes))
    return _grouped(file, name, sizes, size)


def read_arrow(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    """Yield the rows of the piece's record batches."""
    return _iterate_records(piece, iter_arrow_batches(piece.file, piece.start, piece.stop))


def iter_arrow_batches(file: Path, start: int = 0, stop: int | None = None) -> Iterator[Any]:
    """Yield the record batches `start` to `stop` of an Arrow file or stream, memory-mapped: others are not read."""
    pyarrow = _pyarrow(file)
    with _reading(file), pyarrow.memory_map(str(file)) as mapped:
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


def _iterate_records(piece: Piece, batches: Iterator[Any]) -> Iterator[Record]:
    row = piece.line
    for batch in batches:
        for fields in iter_rows(batch, piece.file):
            row += 1
            yield Record(f"{piece.name}:{row}", f"{piece.location}, row {row}", fields)


def iter_rows(batch: Any, file: Path, medium: MediumLoader = lambda content, path: content) -> Iterator[dict[str, Any]]:
    """Yield the rows of a record batch as Python values. `medium` loads media columns; by default paths are not opened."""
    names = batch.schema.names
    if len(set(names)) < len(names):
        (repeated, _), *_ = Counter(names).most_common(1)
        raise DataError(f"{file}: two columns are named {repeated!r}; rename one")
    _validate(batch, file, full=True)
    columns = [_values(column, medium) for column in batch.columns]
    for cells in zip(*columns, strict=True):
        yield dict(zip(names, cells, strict=True))


def _validate(batch: Any, file: Path, *, full: bool = False) -> None:
    """Check the offsets of a batch: pyarrow trusts them, and a wrong one reads foreign memory or crashes the process."""
    with _reading(file):
        batch.validate(full=full)


def _values(column: Any, medium: MediumLoader) -> list[Any]:
    import pyarrow

    types = pyarrow.types
    if types.is_timestamp(column.type) and column.type.unit == "ns":
        # Python's datetime has microseconds; for nanoseconds pyarrow would need pandas.
        column = column.cast(pyarrow.timestamp("us", column.type.tz), safe=False)
    values: list[Any] = column.to_pylist()
    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    simple = (types.is_integer, types.is_floating, types.is_boolean, types.is_null, types.is_binary, types.is_string)
    large = (types.is_large_binary, types.is_large_string, types.is_fixed_size_binary)
    if any(is_kind(kind) for is_kind in (*simple, *large)):
        return values
    return [_plain(value, medium) for value in values]


def _plain(value: Any, medium: MediumLoader) -> Any:
    """Convert times to ISO 8601, durations to seconds and media by `medium`, at any depth."""
    if isinstance(value, dict):
        # Hugging Face's layout of images and audio.
        if value.keys() == {"bytes", "path"}:
            return medium(value["bytes"], value["path"])
        return {name: _plain(item, medium) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, medium) for item in value]
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value) if isinstance(value, Decimal) else value


def _grouped(file: Path, name: str, groups: list[tuple[int, int]], size: int) -> list[Piece]:
    pieces: list[Piece] = []
    start = held = before = rows_held = 0
    for number, (num_rows, num_bytes) in enumerate(groups, start=1):
        held, rows_held = held + num_bytes, rows_held + num_rows
        if held >= size or number == len(groups):
            pieces.append(Piece(file, name, start, number, before))
            start, held, before, rows_held = number, 0, before + rows_held, 0
    return pieces


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow.ipc
    except ImportError as error:
        raise EnvironmentProblem(f"{file}: reading it needs pyarrow; pip install 'bottega[data]'") from error
    open_binary(file).close()  # raises our errors where it cannot be opened
    return pyarrow


def _parquet(file: Path) -> Any:
    _pyarrow(file)
    from pyarrow.parquet import ParquetFile

    return ParquetFile(file)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn errors of pyarrow into a DataError of one line."""
    pyarrow = _pyarrow(file)
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{file} is damaged or of another format: {reason}") from error


PARQUET = Format(kind="parquet", suffixes=frozenset((".parquet",)), read=read_parquet, list_pieces=list_parquet_pieces)
ARROW = Format(kind="arrow", suffixes=frozenset((".arrow", ".feather")), read=read_arrow, list_pieces=list_arrow_pieces)


GROUP_BYTES = 8 << 20


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
        self._pending = 0

    def add(self, record: Record, name: str) -> None:
        self._rows.append(record)
        self._pending += sum(map(_bytes, record.fields.values()))
        self.size = self._file.tell() + self._pending
        if self._pending >= GROUP_BYTES:
            self._write()

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            if self._rows:
                self._write()
        finally:
            if self._writer is not None:
                self._writer.close()
            self._file.close()

    def _write(self) -> None:
        rows, self._rows, self._pending = self._rows, [], 0
        names = list(dict.fromkeys(name for row in rows for name in row.fields))
        new = [] if self._schema is None else sorted(set(names) - set(self._schema.names))
        if new:
            row = next(row for row in rows if new[0] in row.fields)
            raise DataError(
                f"{row.where}: field {new[0]!r} is not in the first rows, which fix the columns of parquet; add it there"
            )
        columns = {name: self._column(name, rows) for name in (names if self._schema is None else self._schema.names)}
        table = self._arrow.table(columns)
        try:
            if self._writer is None:
                self._schema = table.schema
                self._writer = self._arrow.parquet.ParquetWriter(self._file, self._schema, compression="zstd")
            self._writer.write_table(table)
        except self._arrow.ArrowException as error:
            raise DataError(f"{rows[0].where} and {len(rows) - 1} more: {_line(error)}") from error

    def _column(self, name: str, rows: list[Record]) -> Any:
        values = [row.fields.get(name) for row in rows]
        kind = None if self._schema is None else self._schema.field(name).type
        if kind is None:
            array = next((value for value in values if value is not None), None)
            kind = self._nested(array) if isinstance(array, np.ndarray) else None
        try:
            return self._arrow.array([_stored(value) for value in values], type=kind)
        except (self._arrow.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"{rows[0].where} and {len(rows) - 1} more: field {name!r} has values of several types: {_line(error)}"
            ) from error

    def _nested(self, array: np.ndarray) -> Any:
        kind = self._arrow.from_numpy_dtype(array.dtype) if array.dtype.kind in "biuf" else None
        for _ in range(array.ndim if kind is not None else 0):
            kind = self._arrow.list_(kind)
        return kind


def _stored(value: Any) -> Any:
    return value.read_bytes() if isinstance(value, Path) else to_json_value(value)


def _bytes(value: Any) -> int:
    """Return the approximate size of a value, to know when a row group is full."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Path):
        return value.stat().st_size
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 8


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
