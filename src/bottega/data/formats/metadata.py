"""The table beside media: which one describes a file, and its rows by the names it has for the files.

It is read by the reader of its own kind, as strictly as data is. Only what a table without a header may mean is decided
here, because it must name files.
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

TABLES = tuple(f"metadata.{suffix}" for suffix in ("csv", "tsv", "psv", "jsonl", "json", "parquet"))
FILE_COLUMNS = ("file_name", "filename", "file", "path", "id")
# What the columns of a table without a header are where bars divide it, as in LJSpeech.
BARRED = ("id", "text", "normalised")
FORMATS = (jsonlines.FORMAT, jsonlist.FORMAT, columns.PARQUET, columns.ARROW)
_FIRST_LINE = 1 << 20


@dataclass(frozen=True)
class Metadata:
    """A table of descriptions: the rows of each file, by the name the table has for it."""

    path: Path
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    first_records: dict[str, Record] = field(default_factory=dict)
    """Where each name is first."""
    bad: list[BadRecord] = field(default_factory=list)

    def candidate_names(self, file: str) -> Iterator[str]:
        """What the table may call this file, the most exact first: with its folders or not, with its suffix or not."""
        path = PurePosixPath(file)
        yield from dict.fromkeys((file, path.name, path.with_suffix("").as_posix(), path.stem))

    def find_rows(self, file: str) -> list[dict[str, Any]] | None:
        name = next((name for name in self.candidate_names(file) if name in self.rows), None)
        if name is None:
            return None
        # A row for a.png is not about x/a.png where a.png is there as well.
        belongs = name == file or "/" not in file or not (self.path.parent / name).is_file()
        return self.rows[name] if belongs else None

    def add(self, record: Record | BadRecord) -> None:
        if isinstance(record, BadRecord):
            self.bad.append(record)
            return
        row = record.fields
        column = next((name for name in FILE_COLUMNS if name in row), None)
        if column is None or not isinstance(row[column], str) or not row[column]:
            reason = f"names no file: expected text in one of {', '.join(FILE_COLUMNS)}"
            self.bad.append(BadRecord(record.key, record.where, reason))
            return
        name = row[column].removeprefix("./")
        self.first_records.setdefault(name, record._replace(fields={}))
        self.rows.setdefault(name, []).append({key: value for key, value in row.items() if key != column})


def find_table_in(folder: Path) -> Path | None:
    try:
        written = os.stat(folder).st_mtime_ns
    except OSError:
        return None
    # Asked for every file of a folder. One that changed just now may change again without a later time.
    is_settled = written + RACY_NS <= time.time_ns()
    names = _settled_tables(str(folder), written) if is_settled else _tables_in(str(folder))
    return next((folder / name for name in names if _is_table(folder / name)), None)


def _tables_in(folder: str) -> tuple[str, ...]:
    return tuple(name for name in TABLES if os.path.isfile(os.path.join(folder, name)))


@lru_cache(maxsize=4096)
def _settled_tables(folder: str, written: int) -> tuple[str, ...]:
    return _tables_in(folder)


def _is_table(path: Path) -> bool:
    # A metadata.json is often one object about the whole data set.
    return path.suffix != ".json" or compression.read_head(path, 4096).lstrip()[:1] == b"["


def find_table(file: Path, root: Path, source: Source) -> Path | None:
    """The table that describes a file: the recipe's, or the nearest one from its folder up to the root."""
    if source.metadata is not None:
        named = Path(source.metadata).expanduser()
        path = next((path for path in (root / named, named) if path.is_file()), None)
        if path is None:
            raise DataError(f"{root / named} does not exist; metadata names a table beside the files")
        return path
    folder = file.parent
    while True:
        path = find_table_in(folder)
        if path is not None or folder == root or folder == folder.parent:
            return path
        folder = folder.parent


def load_metadata(file: Path, root: Path, source: Source) -> Metadata | None:
    path = find_table(file, root, source)
    if path is None:
        return None
    status = path.stat()
    name = files.relative_name(root if path.is_relative_to(root) else path.parent, path)
    return _cached(Piece(path, name), status.st_mtime_ns, status.st_size, source.delimiter, source.columns)


@lru_cache(maxsize=8)
def _cached(piece: Piece, time: int, size: int, delimiter: str | None, names: tuple[str, ...] | None) -> Metadata:
    """Read once by each process: a record is one file, and the table describes all of them."""
    source = Source(path=str(piece.file), delimiter=delimiter, columns=names)
    metadata = Metadata(piece.file)
    for record in _records(piece, source):
        metadata.add(record)
    return metadata


def _records(piece: Piece, source: Source) -> Iterator[Record | BadRecord]:
    for form in FORMATS:
        if files.match_suffix(piece.file.name, dict.fromkeys(form.suffixes, form.kind)) is not None:
            return form.read(piece, source)
    return table.read_with_layout(piece, _layout(piece.file, source))


def _layout(file: Path, source: Source) -> table.Layout:
    delimiter = table.explicit_delimiter(file, source) or _delimiter(file)
    first = table.read_first_row(file, delimiter)
    if first is None:
        return table.Layout(delimiter, [], has_header=False)
    cells = [cell.strip() for cell in first]
    if source.columns is not None:
        return table.Layout(delimiter, list(source.columns), has_header=cells == list(source.columns))
    if any(name in cells for name in FILE_COLUMNS):
        return table.Layout(delimiter, table.parse_header(first, file), has_header=True)
    if delimiter != "|":
        raise DataError(
            f"{file}, line 1: none of the columns is called {', '.join(FILE_COLUMNS[:-1])} or id; add a header, or "
            "name the columns with data.train.columns"
        )
    names = [BARRED[at] if at < len(BARRED) else f"column_{at + 1}" for at in range(len(cells))]
    return table.Layout(delimiter, names, has_header=False)


def _delimiter(file: Path) -> str:
    with compression.open_decompressed(file) as stream:
        first = stream.readline(_FIRST_LINE)
    # A comma is usual in a text between tabs or bars, never the other way round.
    return next(
        (mark for mark in "\t|" if mark.encode() in first), max(",;", key=lambda mark: first.count(mark.encode()))
    )
