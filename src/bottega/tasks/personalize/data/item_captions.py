"""Captions for items that have none: from a file, or from a captioning model.

Captions of a model are cached by the hashes of the image and of the model.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Sequence
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
from bottega.data.tables.cache import open_database
from bottega.storage.cache_folder import default_cache
from bottega.tasks.personalize.data.records import Item

Captioner = Callable[[Sequence[np.ndarray]], list[str]]
"""From images, uint8 (height, width, 3) of any size, to captions."""
CaptionerLoader = Callable[[Path], Captioner]
"""Loads the captioning model of a folder, and with it torch."""
BATCH_SIZE = 16
WEIGHTS_PATTERN = "*.safetensors"
_HASHED_PATTERNS = (WEIGHTS_PATTERN, "*.json", "*.txt", "*.model")
_MAX_JSON_BYTES = 256 << 20
_CREATE_TABLE = (
    "CREATE TABLE IF NOT EXISTS captions (model TEXT, picture TEXT, caption TEXT, PRIMARY KEY (model, picture)) "
    "WITHOUT ROWID"
)


def is_captioning_model(path: Path) -> bool:
    """Whether data.captions is the folder of a captioning model, not a file of captions."""
    return path.is_dir()


class FileCaptions:
    """Captions in a file, looked up by the id of an item or by the name of its image."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DataError(
                f"data.captions: {path} does not exist; give a caption file or the folder of a captioning model"
            )
        self.path = path
        self.captions_by_name = _read_json_captions(path)
        # Without rows for a JSON object of captions: of the table, only the rules for file names are used then.
        self.table = Metadata(path) if self.captions_by_name is not None else _load_table(path)

    def get_caption(self, item: Item) -> str:
        """Return the caption of an item, empty if the file has none."""
        if self.captions_by_name is not None:
            names = [item.id, *(self.table.list_candidate_names(item.image) if item.image is not None else ())]
            return next((self.captions_by_name[name] for name in names if name in self.captions_by_name), "")
        rows = self.table.rows.get(item.id) or (self.table.find_rows(item.image) if item.image is not None else None)
        if not rows:
            return ""
        try:
            return read_caption(Row(item.id, str(self.path), rows[0]))
        except Unreadable as error:
            raise DataError(f"{self.path}: the row of {item.id!r} {error}") from error


def _load_table(path: Path) -> Metadata:
    table = load_metadata(path, path.parent, Source(metadata=str(path.absolute())))
    assert table is not None, "a named file is always loaded"
    if table.bad_records:
        raise DataError(str(table.bad_records[0]))
    if not table.rows:
        raise DataError(f"data.captions: {path} is empty; give a table with the columns id and caption")
    if all(not _read_caption_or_empty(rows[0]) for rows in table.rows.values()):
        raise DataError(
            f"data.captions: {path} has no captions; give a table with the columns id and caption, and a text in at least one "
            "row"
        )
    return table


def _read_caption_or_empty(row: dict[str, object]) -> str:
    try:
        return read_caption(Row("", "", row))
    except Unreadable:
        return ""


def _read_json_captions(path: Path) -> dict[str, str] | None:
    """Read {"a.jpg": "a red star"}, as captioning programs often write it; None if the file has another layout."""
    if path.suffix.lower() != ".json" or path.stat().st_size > _MAX_JSON_BYTES:
        return None
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        if path.read_bytes().lstrip()[:1] == b"{" and b"\n{" in path.read_bytes():
            return None  # JSON lines in a file named .json
        raise DataError(f"data.captions: {path} is not valid JSON ({error}); correct it") from None
    if not isinstance(content, dict) or "data" in content:
        return None  # a list of rows, or {"data": [rows]}
    bad_name = next((name for name, text in content.items() if not isinstance(text, str)), None)
    if bad_name is not None:
        raise DataError(
            f'data.captions: {path}: {bad_name!r} has {content[bad_name]!r} where a caption was expected; write texts, as in {{"a.jpg": "a star"}}'
        )
    return {PurePosixPath(name).as_posix(): text for name, text in content.items()}


def hash_captioning_model(folder: Path) -> str:
    """Return a hash of all files that affect the captions of a model."""
    files = sorted({path for pattern in _HASHED_PATTERNS for path in folder.glob(pattern) if path.is_file()})
    if not (folder / "config.json").is_file() or not any(path.match(WEIGHTS_PATTERN) for path in files):
        raise UsageError(
            f"data.captions: {folder} is not the folder of a captioning model, which has config.json and *.safetensors; give "
            "one, or a caption file"
        )
    hashes = zip((path.name for path in files), hash_files(files), strict=True)
    return hashlib.sha256(repr(list(hashes)).encode()).hexdigest()


def caption_images(
    images: dict[str, Path], folder: Path, load_captioner: CaptionerLoader, *, progress: ProgressCallback
) -> dict[str, str]:
    """Return the captions of images by hash, from the cache or by the model of `folder`; undecodable images are left out."""
    model_hash = hash_captioning_model(folder)
    try:
        with closing(_open_cache()) as cache:
            return _caption_missing(
                images, folder, load_captioner, progress=progress, model_hash=model_hash, cache=cache
            )
    except (sqlite3.Error, OSError) as error:
        raise EnvironmentProblem(
            f"cannot write captions to {default_cache()}: {error}; free some space, or set XDG_CACHE_HOME to a folder that "
            "can be written"
        ) from error


def _caption_missing(
    images: dict[str, Path],
    folder: Path,
    load_captioner: CaptionerLoader,
    *,
    progress: ProgressCallback,
    model_hash: str,
    cache: sqlite3.Connection,
) -> dict[str, str]:
    captions = {}
    for image_hash in images:
        query = "SELECT caption FROM captions WHERE model = ? AND picture = ?"
        row = cache.execute(query, (model_hash, image_hash)).fetchone()
        if row is not None:
            captions[image_hash] = row[0]
    missing = [image_hash for image_hash in images if image_hash not in captions]
    if not missing:
        return captions
    caption_batch = load_captioner(folder)
    num_done = len(captions)
    progress("captions", num_done, len(images))
    for start in range(0, len(missing), BATCH_SIZE):
        batch = missing[start : start + BATCH_SIZE]
        readable = {
            image_hash: pixels for image_hash in batch if (pixels := _try_decode(images[image_hash])) is not None
        }
        texts = caption_batch(list(readable.values())) if readable else []
        for image_hash, text in zip(readable, texts, strict=True):
            if not text.strip():
                raise DataError(
                    f"data.captions: the model of {folder} gives an empty caption for {images[image_hash]}; caption that item "
                    "in the data, or use another model"
                )
            captions[image_hash] = " ".join(text.split())
        with cache:
            rows = [(model_hash, image_hash, captions[image_hash]) for image_hash in readable]
            cache.executemany("INSERT OR REPLACE INTO captions VALUES (?, ?, ?)", rows)
        num_done += len(batch)
        progress("captions", num_done, len(images))
    return captions


def _try_decode(path: Path) -> np.ndarray | None:
    from bottega.data.image.decode import decode_image

    try:
        return decode_image(path, channels=3)
    except Unreadable:
        return None  # reported when images are prepared, with the record


def _open_cache() -> sqlite3.Connection:
    return open_database("captions.sqlite", _CREATE_TABLE, timeout=30)
