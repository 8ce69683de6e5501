"""Captions for items that have none: from a file by item, or by a model that looks at their pictures.

What a model said is remembered by the hash of the picture and that of the model, so that it is asked once.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path, PurePosixPath

import numpy as np

from bottega.config.data import Source
from bottega.core.errors import DataError, EnvironmentProblem, UsageError
from bottega.data.formats.fingerprint import hash_files
from bottega.data.formats.metadata import Metadata, load_metadata
from bottega.data.prepare.jobs import ProgressCallback
from bottega.data.records.fields import read_caption
from bottega.data.records.record import Record as Row
from bottega.data.records.record import Unreadable
from bottega.data.tables.cache import default_cache, open_database
from bottega.tasks.personalize.data.records import Item

Captioner = Callable[[Sequence[np.ndarray]], list[str]]
"""Pictures, uint8 [h, w, 3] of any size, to what they show in words."""
CaptionerLoader = Callable[[Path], Captioner]
"""Loads the model of a folder, and with it a framework."""
# One look of the model at so many pictures at a time.
AT_ONCE = 16
WEIGHTS = "*.safetensors"
_DECIDING = (WEIGHTS, "*.json", "*.txt", "*.model")
_LARGEST = 256 << 20
_TABLE = (
    "CREATE TABLE IF NOT EXISTS captions (model TEXT, picture TEXT, caption TEXT, PRIMARY KEY (model, picture)) "
    "WITHOUT ROWID"
)


def is_captioning_model(path: Path) -> bool:
    return path.is_dir()


class FileCaptions:
    """A table of captions: what it says of an item, by its id or by the name of its picture."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DataError(
                f"data.captions: {path} does not exist; name a file of captions or the folder of a captioning model"
            )
        self.path = path
        self.plain = _object_of_texts(path)
        self.table = Metadata(path) if self.plain is not None else _table(path)

    def caption_for(self, item: Item) -> str:
        """Blank where it says nothing."""
        if self.plain is not None:
            names = [item.id, *(self.table.candidate_names(item.image) if item.image is not None else ())]
            return next((self.plain[name] for name in names if name in self.plain), "")
        rows = self.table.rows.get(item.id) or (self.table.find_rows(item.image) if item.image is not None else None)
        if not rows:
            return ""
        try:
            return read_caption(Row(item.id, str(self.path), rows[0]))
        except Unreadable as error:
            raise DataError(f"{self.path}: the row of {item.id!r} {error}") from error


def _table(path: Path) -> Metadata:
    found = load_metadata(path, path.parent, Source(metadata=str(path.absolute())))
    assert found is not None, "it was named, so it is taken"
    if found.bad:
        raise DataError(str(found.bad[0]))
    if not found.rows:
        raise DataError(f"data.captions: {path} is empty; give a table with the columns id and caption")
    if all(not _caption(rows[0]) for rows in found.rows.values()):
        raise DataError(f"data.captions: {path} has no column caption; give a table with the columns id and caption")
    return found


def _caption(row: dict[str, object]) -> str:
    try:
        return read_caption(Row("", "", row))
    except Unreadable:
        return ""


def _object_of_texts(path: Path) -> dict[str, str] | None:
    """{"a.jpg": "a red star"}, which is how captioning programs often write them; None where it is something else."""
    if path.suffix.lower() != ".json" or path.stat().st_size > _LARGEST:
        return None
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        if path.read_bytes().lstrip()[:1] == b"{" and b"\n{" in path.read_bytes():
            return None  # lines of objects, by another name
        raise DataError(f"data.captions: {path} is no JSON ({error}); correct it") from None
    if not isinstance(found, dict) or "data" in found:
        return None
    wrong = next((name for name, text in found.items() if not isinstance(text, str)), None)
    if wrong is not None:
        raise DataError(
            f'data.captions: {path}: {wrong!r} has {found[wrong]!r} where a caption was expected, as in {{"a.jpg": "a star"}}'
        )
    return {PurePosixPath(name).as_posix(): text for name, text in found.items()}


def hash_captioning_model(folder: Path) -> str:
    """Of all that decides what the model says."""
    files = sorted({path for pattern in _DECIDING for path in folder.glob(pattern) if path.is_file()})
    if not (folder / "config.json").is_file() or not any(path.match(WEIGHTS) for path in files):
        raise UsageError(
            f"data.captions: {folder} is no folder of a captioning model: config.json and *.safetensors are expected"
        )
    named = zip((path.name for path in files), hash_files(files), strict=True)
    return hashlib.sha256(repr(list(named)).encode()).hexdigest()


def caption_images(
    pictures: dict[str, Path], folder: Path, captioner: CaptionerLoader, *, progress: ProgressCallback
) -> dict[str, str]:
    """What the model of `folder` says of each picture, by its hash. Those that cannot be decoded are left out."""
    model = hash_captioning_model(folder)
    try:
        with closing(_database()) as kept:
            return _described(pictures, folder, captioner, progress=progress, model=model, kept=kept)
    except (sqlite3.Error, OSError) as error:
        raise EnvironmentProblem(
            f"captions cannot be kept in {default_cache()}: {error}; free some space, or set XDG_CACHE_HOME to a folder that "
            "can be written"
        ) from error


def _described(
    pictures: dict[str, Path],
    folder: Path,
    captioner: CaptionerLoader,
    *,
    progress: ProgressCallback,
    model: str,
    kept: sqlite3.Connection,
) -> dict[str, str]:
    known = {}
    for picture in pictures:
        asked = (model, picture)
        row = kept.execute("SELECT caption FROM captions WHERE model = ? AND picture = ?", asked).fetchone()
        if row is not None:
            known[picture] = row[0]
    left = [picture for picture in pictures if picture not in known]
    if not left:
        return known
    describe = captioner(folder)
    done = len(known)
    progress("captions", done, len(pictures))
    for some in _groups(left):
        readable = {picture: pixels for picture in some if (pixels := _pixels(pictures[picture])) is not None}
        said = describe(list(readable.values())) if readable else []
        for picture, caption in zip(readable, said, strict=True):
            if not caption.strip():
                raise DataError(f"data.captions: the model of {folder} says nothing about {pictures[picture]}")
            known[picture] = " ".join(caption.split())
        with kept:
            rows = [(model, picture, known[picture]) for picture in readable]
            kept.executemany("INSERT OR REPLACE INTO captions VALUES (?, ?, ?)", rows)
        done += len(some)
        progress("captions", done, len(pictures))
    return known


def _groups(names: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), AT_ONCE):
        yield names[start : start + AT_ONCE]


def _pixels(path: Path) -> np.ndarray | None:
    from bottega.data.image.decode import decode_image

    try:
        return decode_image(path, channels=3)
    except Unreadable:
        return None  # damage is told where pictures are prepared, with the record


def _database() -> sqlite3.Connection:
    return open_database("captions.sqlite", _TABLE, timeout=30)
