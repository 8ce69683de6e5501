"""Metadata tables of media files: which table describes a file, and its rows by file name.

A table is read by the reader of its own format, as strictly as data is. Only for delimited text the delimiter, the header and
the columns are decided here, since one column must name the files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats import columns, compression, files, jsonlines, jsonlist, table
from bottega.data.formats.fingerprint import RACY_NS
from bottega.data.formats.reader import Piece
from bottega.data.records.record import BadRecord, Record

TABLE_NAMES = tuple(f"metadata.{suffix}" for suffix in ("csv", "tsv", "psv", "jsonl", "json", "parquet"))
FILE_COLUMNS = ("file_name", "filename", "file", "path", "id")
# Columns of a pipe-separated table without a header, as in LJSpeech.
PIPE_COLUMNS = ("id", "text", "normalised")
RECORD_FORMATS = (jsonlines.FORMAT, jsonlist.FORMAT, columns.PARQUET, columns.ARROW)
_MAX_FIRST_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Metadata:
    """The rows of a metadata table, by the file name in each row."""

    path: Path
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    first_records: dict[str, Record] = field(default_factory=dict)
    """The first record of each file name, without its fields; used in messages."""
    bad_records: list[BadRecord] = field(default_factory=list)

    def list_candidate_names(self, file: str) -> Iterator[str]:
        """Yield the names a table may use for this file, the most exact first: with or without folders and suffix."""
        path = PurePosixPath(file)
        yield from dict.fromkeys((file, path.name, path.with_suffix("").as_posix(), path.stem))

    def find_rows(self, file: str) -> list[dict[str, Any]] | None:
        """Return the rows about a file, or None."""
        name = next((name for name in self.list_candidate_names(file) if name in self.rows), None)
        if name is None:
            return None
        # A row for a.png is not about x/a.png if a.png exists as well.
        belongs = name == file or "/" not in file or not (self.path.parent / name).is_file()
        return self.rows[name] if belongs else None

    def add(self, record: Record | BadRecord) -> None:
        """Add one row of the table; a row that names no file is a bad record."""
        if isinstance(record, BadRecord):
            self.bad_records.append(record)
            return
        row = record.fields
        column = next((name for name in FILE_COLUMNS if name in row), None)
        if column is None or not isinstance(row[column], str) or not row[column]:
            reason = f"names no file; expected a file name in one of {', '.join(FILE_COLUMNS)}"
            self.bad_records.append(BadRecord(record.key, record.where, reason))
            return
        name = row[column].removeprefix("./")
        self.first_records.setdefault(name, record._replace(fields={}))
        self.rows.setdefault(name, []).append({key: value for key, value in row.items() if key != column})


def find_table_in(folder: Path) -> Path | None:
    """Return the metadata table in a folder, or None."""
    try:
        mtime = os.stat(folder).st_mtime_ns
    except OSError:
        return None
    # Called for every file of a folder, hence cached; but a recent change may be followed by one with the same mtime.
    is_stable = mtime + RACY_NS <= time.time_ns()
    names = _list_tables_cached(str(folder), mtime) if is_stable else _list_tables(str(folder))
    return next((folder / name for name in names if _is_table(folder / name)), None)


def _list_tables(folder: str) -> tuple[str, ...]:
    return tuple(name for name in TABLE_NAMES if os.path.isfile(os.path.join(folder, name)))


@lru_cache(maxsize=4096)
def _list_tables_cached(folder: str, mtime: int) -> tuple[str, ...]:
    return _list_tables(folder)


def _is_table(path: Path) -> bool:
    # metadata.json is often one object about the whole dataset.
    return path.suffix != ".json" or compression.read_head(path, 4096).lstrip()[:1] == b"["


def find_table(file: Path, root: Path, source: Source) -> Path | None:
    """Return the table that describes a file: the recipe's, or the nearest one from its folder up to the root."""
    if source.metadata is not None:
        path_option = Path(source.metadata).expanduser()
        candidates = (root / path_option, path_option)
        path = next((path for path in candidates if path.is_file()), None)
        if path is None:
            places = " or ".join(dict.fromkeys(str(path.absolute()) for path in candidates))
            raise DataError(f"data.train.metadata: there is no file {places}; give the path of a table about the files")
        return path
    folder = file.parent
    while True:
        path = find_table_in(folder)
        if path is not None or folder == root or folder == folder.parent:
            return path
        folder = folder.parent


def load_metadata(file: Path, root: Path, source: Source) -> Metadata | None:
    """Return the table that describes a file, read once per process, or None."""
    path = find_table(file, root, source)
    if path is None:
        return None
    status = path.stat()
    name = files.get_relative_name(root if path.is_relative_to(root) else path.parent, path)
    return _read_cached(Piece(path, name), status.st_mtime_ns, status.st_size, source.delimiter, source.columns)


@lru_cache(maxsize=8)
def _read_cached(piece: Piece, mtime: int, size: int, delimiter: str | None, names: tuple[str, ...] | None) -> Metadata:
    """Read a table; cached because every media file looks up its row in it."""
    source = Source(path=str(piece.file), delimiter=delimiter, columns=names)
    metadata = Metadata(piece.file)
    for record in _read_records(piece, source):
        metadata.add(record)
    return metadata


def _read_records(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    for format in RECORD_FORMATS:
        if files.match_suffix(piece.file.name, dict.fromkeys(format.suffixes, format.kind)) is not None:
            return format.read(piece, source)
    return table.read_with_layout(piece, _detect_layout(piece.file, source))


def _detect_layout(file: Path, source: Source) -> table.Layout:
    delimiter = table.find_explicit_delimiter(file, source) or _detect_delimiter(file)
    first_row = table.read_first_row(file, delimiter)
    if first_row is None:
        return table.Layout(delimiter, [], has_header=False)
    cells = [cell.strip() for cell in first_row]
    if source.columns is not None:
        return table.Layout(delimiter, list(source.columns), has_header=cells == list(source.columns))
    if any(name in cells for name in FILE_COLUMNS):
        return table.Layout(delimiter, table.parse_header(first_row, file), has_header=True)
    if delimiter != "|":
        raise DataError(
            f"{file}, line 1: no column is named {', '.join(FILE_COLUMNS[:-1])} or id; add a header, or "
            "set data.train.columns"
        )
    names = [PIPE_COLUMNS[index] if index < len(PIPE_COLUMNS) else f"column_{index + 1}" for index in range(len(cells))]
    return table.Layout(delimiter, names, has_header=False)


def _detect_delimiter(file: Path) -> str:
    with compression.open_decompressed(file) as stream:
        first_line = stream.readline(_MAX_FIRST_LINE_BYTES)
    # Text between tabs or pipes often has commas, never the other way round.
    return next(
        (mark for mark in "\t|" if mark.encode() in first_line),
        max(",;", key=lambda mark: first_line.count(mark.encode())),
    )
