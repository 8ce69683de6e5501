"""Folders of images, sounds or videos: each file is a record, described by its sub-folder or by a table beside it.

Without a table the first sub-folder below the root is the class. With one (`metadata.csv` and its kin in the folder of a
file or above it, or the one the recipe names) its rows describe the files and folders mean nothing.
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


def _read(piece: Piece, source: Source, *, what: str, suffixes: frozenset[str]) -> Iterator[Record | BadRecord]:
    root = _root(piece)
    metadata = load_metadata(piece.file, root, source)
    if metadata is not None:
        folder = metadata.path.parent if metadata.path.is_relative_to(root) else root
        if piece.file == _first(folder, suffixes, source.metadata is None):
            yield from _orphans(metadata, folder, root, what)
    where = piece.location
    problem = _problem(piece.file)
    if problem is not None:
        yield BadRecord(piece.name, where, problem)
        return
    if metadata is None:
        folders = PurePosixPath(piece.name).parts[:-1]
        label = {"label": folders[0]} if folders else {}
        yield Record(piece.name, where, {**label, what: piece.file})
        return
    rows = metadata.find_rows(_named(piece.file, metadata.path.parent, root)) or [{}]
    for number, row in enumerate(rows, start=1):
        # Several rows of one file, such as five captions of one picture, are as many records.
        yield Record(piece.name if number == 1 else f"{piece.name}:{number}", where, {**row, what: piece.file})


IMAGES = Format("images", IMAGE_SUFFIXES, partial(_read, what="image", suffixes=IMAGE_SUFFIXES), is_media=True)
AUDIO = Format("audio", AUDIO_SUFFIXES, partial(_read, what="audio", suffixes=AUDIO_SUFFIXES), is_media=True)
VIDEO = Format("video", VIDEO_SUFFIXES, partial(_read, what="video", suffixes=VIDEO_SUFFIXES), is_media=True)


def _root(piece: Piece) -> Path:
    return piece.file.parents[len(PurePosixPath(piece.name).parts) - 1]


def _problem(file: Path) -> str | None:
    try:
        mode = os.stat(file).st_mode
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if stat.S_ISREG(mode) else "is no regular file"


def _named(file: Path, folder: Path, root: Path) -> str:
    """The file as a table in `folder` would name it."""
    base = folder if file.is_relative_to(folder) else root
    return file.relative_to(base).as_posix()


def _orphans(metadata: Metadata, base: Path, root: Path, what: str) -> Iterator[BadRecord]:
    """What no file stands for: bad lines, and rows whose file is missing. They come with the first file, once."""
    yield from metadata.bad
    missing = dict(metadata.first_records)
    for folder, _, files in os.walk(base):
        for file in files:
            for name in metadata.candidate_names(_named(Path(folder, file), metadata.path.parent, root)):
                missing.pop(name, None)
    if missing and len(missing) == len(metadata.first_records):
        name, first = next(iter(missing.items()))
        place = first.where.removeprefix(f"{metadata.path}, ")
        raise DataError(
            f"{metadata.path}: none of its {len(missing)} rows names a file under {base}, such as {name!r} in {place}"
        )
    for name, row in missing.items():
        yield BadRecord(row.key, row.where, f"names the {what} {name!r}, which is missing")


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
            if skip_described and find_table_in(Path(entry.path)) is not None:
                continue
            below = _first(Path(entry.path), suffixes, skip_described)
            if below is not None:
                return below
        elif Path(entry.name).suffix.lower() in suffixes and entry.is_file():
            return Path(entry.path)
    return None
