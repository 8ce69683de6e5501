"""Folders of images, audio or video files: each file is a record, labelled by its sub-folder or by a metadata table.

Without a table the first sub-folder below the root is the class. With a table (`metadata.csv` or the like in the
folder of a file or above it, or the one the recipe names), its rows describe the files, and sub-folders have no meaning.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath

from bottega.config.data import Source
from bottega.core.errors import DataError
from bottega.data.formats.metadata import Metadata, find_table_in, load_metadata
from bottega.data.formats.reader import Format, Piece
from bottega.data.records.record import BadRecord, Record

IMAGE_SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
)
AUDIO_SUFFIXES = frozenset(
    (".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".aif", ".aiff", ".au", ".w64", ".caf", ".m4a", ".aac")
)
VIDEO_SUFFIXES = frozenset(
    (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".ts", ".flv", ".ogv", ".wmv", ".3gp")
)


def _read(piece: Piece, source: Source, *, field: str, suffixes: frozenset[str]) -> Iterator[Record | BadRecord]:
    root = _find_root(piece)
    metadata = load_metadata(piece.file, root, source)
    if metadata is not None:
        folder = metadata.path.parent if metadata.path.is_relative_to(root) else root
        if piece.file == _find_first_file(folder, suffixes, source.metadata is None):
            yield from _find_unmatched_rows(metadata, folder, root, field)
    where = piece.location
    problem = _find_file_problem(piece.file)
    if problem is not None:
        yield BadRecord(piece.name, where, problem)
        return
    if metadata is None:
        folders = PurePosixPath(piece.name).parts[:-1]
        label_field = {"label": folders[0]} if folders else {}
        yield Record(piece.name, where, {**label_field, field: piece.file})
        return
    rows = metadata.find_rows(_get_name_in_table(piece.file, metadata.path.parent, root)) or [{}]
    for number, row in enumerate(rows, start=1):
        # Several rows for one file, such as five captions of one image, become one record each.
        yield Record(piece.name if number == 1 else f"{piece.name}:{number}", where, {**row, field: piece.file})


IMAGES = Format("images", IMAGE_SUFFIXES, partial(_read, field="image", suffixes=IMAGE_SUFFIXES), is_media=True)
AUDIO = Format("audio", AUDIO_SUFFIXES, partial(_read, field="audio", suffixes=AUDIO_SUFFIXES), is_media=True)
VIDEO = Format("video", VIDEO_SUFFIXES, partial(_read, field="video", suffixes=VIDEO_SUFFIXES), is_media=True)


def _find_root(piece: Piece) -> Path:
    return piece.file.parents[len(PurePosixPath(piece.name).parts) - 1]


def _find_file_problem(file: Path) -> str | None:
    try:
        mode = os.stat(file).st_mode
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if stat.S_ISREG(mode) else "is not a regular file"


def _get_name_in_table(file: Path, folder: Path, root: Path) -> str:
    """Return the file name as a table in `folder` would give it."""
    base = folder if file.is_relative_to(folder) else root
    return file.relative_to(base).as_posix()


def _find_unmatched_rows(metadata: Metadata, base: Path, root: Path, field: str) -> Iterator[BadRecord]:
    """Yield the unreadable rows of a table, and the rows whose file is missing. They are reported once, with the first file."""
    yield from metadata.bad_records
    unmatched = dict(metadata.first_records)
    for folder, _, files in os.walk(base):
        for file in files:
            for name in metadata.list_candidate_names(
                _get_name_in_table(Path(folder, file), metadata.path.parent, root)
            ):
                unmatched.pop(name, None)
    if unmatched and len(unmatched) == len(metadata.first_records):
        name, first_record = next(iter(unmatched.items()))
        location = first_record.where.removeprefix(f"{metadata.path}, ")
        raise DataError(
            f"{metadata.path}: none of its {len(unmatched)} rows matches a file under {base}, such as {name!r} in "
            f"{location}; correct the file names in the table"
        )
    for name, row in unmatched.items():
        yield BadRecord(row.key, row.where, f"names the {field} file {name!r}, which is missing")


@lru_cache(maxsize=64)
def _find_first_file(folder: Path, suffixes: frozenset[str], skip_described: bool) -> Path | None:
    """Return the first media file of a folder by name: problems of the whole table are reported once, with this file.

    With `skip_described`, sub-folders that have a table of their own are skipped, since this table is not about them.
    """
    with os.scandir(folder) as entries:
        sorted_entries = sorted(entries, key=lambda entry: entry.name)
    for entry in sorted_entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            if skip_described and find_table_in(Path(entry.path)) is not None:
                continue
            nested_file = _find_first_file(Path(entry.path), suffixes, skip_described)
            if nested_file is not None:
                return nested_file
        elif Path(entry.name).suffix.lower() in suffixes and entry.is_file():
            return Path(entry.path)
    return None
