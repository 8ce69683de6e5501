"""Parquet shards: a column for each field, in row groups of about 8 MiB, packed with zstd. Media are bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.core.errors import DataError, EnvironmentProblem
from bottega.data.records.record import Record
from bottega.data.writers import Shard, plain

GROUP_BYTES = 8 << 20


@final
class ParquetShard(Shard):
    """The first row group says which columns there are, and of what type."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise EnvironmentProblem(
                "writing parquet needs the package pyarrow; pip install 'bottega[data]'"
            ) from error
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
            raise DataError(f"{row.where}: field {new[0]!r} is new; in parquet the first rows have all columns")
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
                f"{rows[0].where} and {len(rows) - 1} more: field {name!r} is not of one type: {_line(error)}"
            ) from error

    def _nested(self, array: np.ndarray) -> Any:
        kind = self._arrow.from_numpy_dtype(array.dtype) if array.dtype.kind in "biuf" else None
        for _ in range(array.ndim if kind is not None else 0):
            kind = self._arrow.list_(kind)
        return kind


def _stored(value: Any) -> Any:
    return value.read_bytes() if isinstance(value, Path) else plain(value)


def _bytes(value: Any) -> int:
    """About what it takes; only to know when a row group is full."""
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
