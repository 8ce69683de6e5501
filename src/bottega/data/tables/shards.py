"""Tables on disk: one memory-mapped binary file per column, with access to any row in constant time.

A folder holds `columns.json` and, for each column, `NAME.bin` with the values end to end. Columns of varying length also
have `NAME.ends.bin` with the end of each row. Text is bytes in UTF-8.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal, final

import numpy as np

from bottega.core.errors import DataError

COLUMNS_FILE = "columns.json"


@dataclass(frozen=True)
class Column:
    """Type of a column: `shape` is the shape of a row, without the first axis if that varies."""

    dtype: str = "|u1"
    shape: tuple[int, ...] = ()
    varying: bool = False
    """Whether rows are (n, *shape), with another n for each row."""
    holds: Literal["numbers", "text", "bytes"] = "numbers"

    @property
    def row_bytes(self) -> int:
        """Size in bytes of one row, or of one of the n elements of a varying row."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)


TEXT = Column(varying=True, holds="text")
BYTES = Column(varying=True, holds="bytes")


@final
class ShardWriter:
    """Appends rows to a folder. A context manager; `columns.json` is written last, when all rows are on disk."""

    def __init__(self, folder: Path, columns: Mapping[str, Column]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.columns, self.num_rows = folder, dict(columns), 0
        self.ends = dict.fromkeys((name for name, column in columns.items() if column.varying), 0)
        self._exit_stack = ExitStack()
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> ShardWriter:
        names = [*(f"{name}.bin" for name in self.columns), *(f"{name}.ends.bin" for name in self.ends)]
        self._files = {name: self._exit_stack.enter_context((self.folder / name).open("wb")) for name in names}
        return self

    def add(self, row: Mapping[str, Any]) -> None:
        """Append one row: a value for each column."""
        for name, column in self.columns.items():
            values = _encode_value(row[name], column, name)
            self._files[f"{name}.bin"].write(values)
            if column.varying:
                self.ends[name] += len(values) // column.row_bytes
                self._files[f"{name}.ends.bin"].write(self.ends[name].to_bytes(8, "little"))
        self.num_rows += 1

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._exit_stack.close()
        if kind is None:
            _write_columns_file(self.folder, self.columns, self.num_rows)


def _encode_value(value: Any, column: Column, name: str) -> bytes | memoryview:
    if column.holds == "text":
        return str(value).encode(errors="backslashreplace")
    if column.holds == "bytes":
        return bytes(value)
    array = np.asarray(value, dtype=column.dtype, order="C")
    shape = array.shape[1:] if column.varying else array.shape
    assert shape == column.shape, f"column {name}: a row of shape {array.shape}, expected {column}"
    return array.reshape(-1).view(np.uint8).data


def _write_columns_file(folder: Path, columns: Mapping[str, Column], num_rows: int) -> None:
    content = {"rows": num_rows, "columns": {name: asdict(column) for name, column in columns.items()}}
    (folder / COLUMNS_FILE).write_text(json.dumps(content, indent=1))


def merge_tables(parts: Iterable[Path], folder: Path, columns: Mapping[str, Column]) -> int:
    """Concatenate the rows of several folders of the same columns into one; return the number of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = [Table(part) for part in parts]
    for name, column in columns.items():
        with (folder / f"{name}.bin").open("wb") as out:
            for table in tables:
                _append_file(out, table.folder / f"{name}.bin")
        if column.varying:
            offset = 0
            with (folder / f"{name}.ends.bin").open("wb") as out:
                for table in tables:
                    ends = table.ends(name) + offset
                    out.write(ends.astype("<i8").tobytes())
                    offset = int(ends[-1]) if len(ends) else offset
    num_rows = sum(map(len, tables))
    _write_columns_file(folder, columns, num_rows)
    return num_rows


def _append_file(out: BinaryIO, path: Path) -> None:
    """Append the file `path` to `out`; on Linux the kernel copies it without passing it through this process."""
    with path.open("rb") as source:
        if sys.platform != "linux":
            shutil.copyfileobj(source, out, 1 << 20)
            return
        out.flush()
        while os.sendfile(out.fileno(), source.fileno(), None, 1 << 30):
            pass
    out.seek(0, os.SEEK_END)


@final
class Table:
    """The rows of a folder, memory-mapped. Cheap to pickle: another process maps the files again."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        try:
            meta = json.loads((self.folder / COLUMNS_FILE).read_bytes())
            self.columns = {name: _parse_column(name, fields) for name, fields in meta["columns"].items()}
            self.num_rows = int(meta["rows"])
            self._check_sizes()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{self.folder} is not a table of prepared data, or a damaged one: {error}") from error

    def _check_sizes(self) -> None:
        """Raise ValueError unless the files have the sizes that columns.json implies: a table may come from anywhere."""
        for name, column in self.columns.items():
            size = (self.folder / f"{name}.bin").stat().st_size
            if column.varying:
                ends = self.ends(name)
                is_decreasing = len(ends) > 0 and (int(ends[0]) < 0 or not (ends[1:] >= ends[:-1]).all())
                if len(ends) != self.num_rows or is_decreasing:
                    raise ValueError(f"{name}.ends.bin does not match {self.num_rows} rows")
                num_values = int(ends[-1]) if len(ends) else 0
            else:
                num_values = self.num_rows
            if size != num_values * column.row_bytes:
                raise ValueError(f"{name}.bin has {size} bytes, not {num_values * column.row_bytes}")

    def __len__(self) -> int:
        return self.num_rows

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def gather(self, name: str, index: np.ndarray) -> np.ndarray:
        """Return the rows `index` (n,) of a column of fixed shape: (n, *shape), a copy."""
        return np.take(self.values(name), index, axis=0)

    def row(self, name: str, number: int) -> Any:
        """Return one row: an array (a view of the file if lengths vary), text or bytes."""
        column, values = self.columns[name], self.values(name)
        if not column.varying:
            return values[number]
        ends = self.ends(name)
        row = values[int(ends[number - 1]) if number else 0 : int(ends[number])]
        if column.holds == "numbers":
            return row
        return row.tobytes().decode() if column.holds == "text" else row.tobytes()

    def lengths(self, name: str) -> np.ndarray:
        """Return the length of each row of a varying column."""
        return np.diff(self.ends(name), prepend=0)

    def iter_rows(self) -> Iterator[dict[str, Any]]:
        """Yield all rows as dictionaries."""
        for number in range(self.num_rows):
            yield {name: self.row(name, number) for name in self.columns}

    def values(self, name: str) -> np.ndarray:
        """Return all values of a column, memory-mapped: (rows, *shape), or (total, *shape) if lengths vary."""
        if name not in self._values:
            column = self.columns[name]
            self._values[name] = _memory_map(self.folder / f"{name}.bin", column.dtype).reshape(-1, *column.shape)
        return self._values[name]

    def ends(self, name: str) -> np.ndarray:
        """Return the end of each row of a varying column, memory-mapped."""
        if name not in self._ends:
            self._ends[name] = _memory_map(self.folder / f"{name}.ends.bin", "<i8")
        return self._ends[name]

    @cached_property
    def _values(self) -> dict[str, np.ndarray]:
        return {}

    @cached_property
    def _ends(self) -> dict[str, np.ndarray]:
        return {}


def _parse_column(name: str, fields: Mapping[str, Any]) -> Column:
    """Parse a column of columns.json: plain number types only, and a name that stays in its folder."""
    if not re.fullmatch(r"\w[\w-]*", name):
        raise ValueError(f"{name!r} is not a column name")
    column = Column(**{**fields, "shape": tuple(fields["shape"])})
    if not isinstance(column.dtype, str) or not re.fullmatch(r"[<|][biufc][0-9]{1,2}", column.dtype):
        # An array of objects would interpret bytes of the file as addresses.
        raise ValueError(f"{column.dtype!r} is not a number type")
    if not all(type(side) is int and side >= 0 for side in column.shape) or column.row_bytes == 0:
        raise ValueError(f"{column.shape} is not a shape")
    if column.holds not in ("numbers", "text", "bytes") or type(column.varying) is not bool:
        raise ValueError(f"{name} holds {column.holds!r}")
    return column


def _memory_map(path: Path, dtype: str) -> np.ndarray:
    # An empty file cannot be mapped. Indexing a plain array over the map is faster than numpy's memmap class.
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
