"""Folders of images, sounds or videos: each file is a record, described by its sub-folder or by a table beside it.

Without a table the first sub-folder below the root is the class. With one (`metadata.csv`, `.tsv` or `.jsonl` in the
folder of a file or above it, or the one the recipe names) its rows describe the files and folders mean nothing.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

from bottega.core.errors import DataError
from bottega.data.readers.reader import Format, Piece
from bottega.data.record import Bad, Record
from bottega.schema.data import Source

IMAGE_SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
)
AUDIO_SUFFIXES = frozenset(
    (".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aif", ".aiff", ".au", ".w64", ".caf", ".m4a", ".aac")
)
VIDEO_SUFFIXES = frozenset(
    (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".ts", ".flv", ".ogv", ".wmv", ".3gp")
)
TABLES = ("metadata.csv", "metadata.tsv", "metadata.jsonl")
FILE_COLUMNS = ("file_name", "filename", "file", "path", "id")
# What the columns of a table without a header are where bars divide it, as in LJSpeech.
BARRED = ("id", "text", "normalised")


@dataclass(frozen=True)
class Metadata:
    """A table of descriptions: the rows of each file, by the name the table has for it."""

    path: Path
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    """Where each name is first."""
    bad: list[tuple[int, str]] = field(default_factory=list)
    """Lines that cannot be read, and why."""

    def names(self, file: str) -> Iterator[str]:
        """What the table may call this file, the most exact first: with its folders or not, with its suffix or not."""
        path = PurePosixPath(file)
        yield from dict.fromkeys((file, path.name, path.with_suffix("").as_posix(), path.stem))

    def rows_of(self, file: str) -> list[dict[str, Any]] | None:
        name = next((name for name in self.names(file) if name in self.rows), None)
        if name is None:
            return None
        # A row for a.png is not about x/a.png where a.png is there as well.
        belongs = name == file or "/" not in file or not (self.path.parent / name).is_file()
        return self.rows[name] if belongs else None

    def add(self, line: int, row: dict[str, Any]) -> None:
        column = next((name for name in FILE_COLUMNS if name in row), None)
        if column is None or not isinstance(row[column], str) or not row[column]:
            self.bad.append((line, f"names no file: expected text in one of {', '.join(FILE_COLUMNS)}"))
            return
        name = row[column].removeprefix("./")
        self.lines.setdefault(name, line)
        self.rows.setdefault(name, []).append({key: value for key, value in row.items() if key != column})


def _read(piece: Piece, source: Source, *, what: str, suffixes: frozenset[str]) -> Iterator[Record | Bad]:
    root = _root(piece)
    metadata = _metadata(piece.file, root, source)
    if metadata is not None:
        folder = metadata.path.parent if metadata.path.is_relative_to(root) else root
        if piece.file == _first(folder, suffixes, source.metadata is None):
            yield from _orphans(metadata, folder, root, what)
    where = str(piece.file)
    problem = _problem(piece.file, root)
    if problem is not None:
        yield Bad(piece.name, where, problem)
        return
    if metadata is None:
        folders = PurePosixPath(piece.name).parts[:-1]
        label = {"label": folders[0]} if folders else {}
        yield Record(piece.name, where, {**label, what: piece.file})
        return
    rows = metadata.rows_of(_named(piece.file, metadata.path.parent, root)) or [{}]
    for number, row in enumerate(rows, start=1):
        # Several rows of one file, such as five captions of one picture, are as many records.
        yield Record(piece.name if number == 1 else f"{piece.name}:{number}", where, {**row, what: piece.file})


IMAGES = Format("images", IMAGE_SUFFIXES, partial(_read, what="image", suffixes=IMAGE_SUFFIXES), is_media=True)
AUDIO = Format("audio", AUDIO_SUFFIXES, partial(_read, what="audio", suffixes=AUDIO_SUFFIXES), is_media=True)
VIDEO = Format("video", VIDEO_SUFFIXES, partial(_read, what="video", suffixes=VIDEO_SUFFIXES), is_media=True)


def _root(piece: Piece) -> Path:
    return piece.file.parents[len(PurePosixPath(piece.name).parts) - 1]


def _problem(file: Path, root: Path) -> str | None:
    try:
        real = file.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if not real.is_relative_to(root.resolve()):
        return f"is a link that leaves {root}; copy the file into the folder"
    return None if real.is_file() else "is no regular file"


def _named(file: Path, folder: Path, root: Path) -> str:
    """The file as a table in `folder` would name it."""
    base = folder if file.is_relative_to(folder) else root
    return file.relative_to(base).as_posix()


def table_of(file: Path, root: Path, source: Source) -> Path | None:
    """The table that describes a file: the recipe's, or the nearest one from its folder up to the root."""
    if source.metadata is not None:
        named = Path(source.metadata).expanduser()
        path = next((path for path in (root / named, named) if path.is_file()), None)
        if path is None:
            raise DataError(f"{root / named} does not exist; metadata names a table beside the files")
        return path
    folder = file.parent
    while True:
        path = next((folder / name for name in TABLES if (folder / name).is_file()), None)
        if path is not None or folder == root or folder == folder.parent:
            return path
        folder = folder.parent


def _metadata(file: Path, root: Path, source: Source) -> Metadata | None:
    path = table_of(file, root, source)
    if path is None:
        return None
    status = path.stat()
    return _cached(path, status.st_mtime_ns, status.st_size, source.delimiter, source.columns)


@lru_cache(maxsize=8)
def _cached(path: Path, time: int, size: int, delimiter: str | None, columns: tuple[str, ...] | None) -> Metadata:
    """Read once by each process: a record is one file, and the table describes all of them."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}; convert it to UTF-8") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    metadata = Metadata(path)
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        _read_json(metadata, text)
    else:
        _read_table(metadata, text, delimiter, columns)
    return metadata


def _read_json(metadata: Metadata, text: str) -> None:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            metadata.bad.append((number, f"no valid JSON: {error}"))
            continue
        if isinstance(row, dict):
            metadata.add(number, row)
        else:
            metadata.bad.append((number, f"a row must be an object, not {type(row).__name__}"))


def _read_table(metadata: Metadata, text: str, delimiter: str | None, columns: tuple[str, ...] | None) -> None:
    first = text.partition("\n")[0]
    # A comma is usual in a text between tabs or bars, never the other way round.
    delimiter = delimiter or next((mark for mark in ("\t", "|") if mark in first), None)
    delimiter = delimiter or max(",;", key=first.count)
    lines = io.StringIO(text, newline="")
    if delimiter in "\t|":  # there a quotation mark is part of the text
        reader = csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE, strict=True)
    else:
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
    names: list[str] = list(columns or ())
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            metadata.bad.append((number, str(error)))
            continue
        if not cells:
            continue
        if not names:
            names = [name.strip() for name in cells]
            if any(name in FILE_COLUMNS for name in names):
                continue
            names = _names_without_header(metadata.path, delimiter, cells)
        if len(cells) == len(names):
            metadata.add(number, dict(zip(names, cells, strict=True)))
        else:
            metadata.bad.append((number, f"has {len(cells)} columns, and {len(names)} are expected"))


def _names_without_header(path: Path, delimiter: str, cells: list[str]) -> list[str]:
    if delimiter != "|":
        raise DataError(
            f"{path}, line 1: none of the columns is called {', '.join(FILE_COLUMNS[:-1])} or id; add a header, or "
            "name the columns with data.train.columns"
        )
    return [BARRED[at] if at < len(BARRED) else f"column_{at + 1}" for at in range(len(cells))]


def _orphans(metadata: Metadata, base: Path, root: Path, what: str) -> Iterator[Bad]:
    """What no file stands for: bad lines, and rows whose file is missing. They come with the first file, once."""
    table = _named(metadata.path, root, metadata.path.parent)
    for number, reason in metadata.bad:
        yield Bad(f"{table}:{number}", f"{metadata.path}, line {number}", reason)
    missing = dict(metadata.lines)
    for folder, _, files in os.walk(base):
        for file in files:
            for name in metadata.names(_named(Path(folder, file), metadata.path.parent, root)):
                missing.pop(name, None)
    if missing and len(missing) == len(metadata.lines):
        name, number = next(iter(missing.items()))
        raise DataError(
            f"{metadata.path}: none of its {len(missing)} rows names a file under {base}, such as {name!r} in line "
            f"{number}"
        )
    for name, number in missing.items():
        yield Bad(
            f"{table}:{number}", f"{metadata.path}, line {number}", f"names the {what} {name!r}, which is missing"
        )


@lru_cache(maxsize=64)
def _first(folder: Path, suffixes: frozenset[str], skip_described: bool) -> Path | None:
    """The first file of a folder, in an order of ours: the one place where what concerns the whole table is said.

    Sub-folders with a table of their own are left out, because their files do not ask for this one.
    """
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            if skip_described and any(Path(entry.path, name).is_file() for name in TABLES):
                continue
            below = _first(Path(entry.path), suffixes, skip_described)
            if below is not None:
                return below
        elif Path(entry.name).suffix.lower() in suffixes and entry.is_file():
            return Path(entry.path)
    return None
