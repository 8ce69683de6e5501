"""FLICKR-AES (Ren et al., 2017): scores from 1 to 5 that workers gave to 40,000 photographs.

The table `FLICKR-AES_image_labeled_by_each_worker.csv` has the columns worker, imagePair and score; the images are in `40K/`.
Scores have no time, so the images that a worker liked are ordered by hash. Each image that has enough images before it is the
target once, with those right before it as the history.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from bottega.core.errors import DataError
from bottega.data.formats.compression import open_decompressed
from bottega.data.records.record import BadRecord
from bottega.tasks.personalize.config import PersonalizeData
from bottega.tasks.personalize.data.collections import (
    DEFAULT_HISTORY_LENGTH,
    CollectionRecords,
    find_file,
    find_image_root,
    find_subfolder,
    shuffle_by_hash,
)
from bottega.tasks.personalize.data.records import Item, Record

TABLE_FILE = "FLICKR-AES_image_labeled_by_each_worker.csv"
IMAGE_FOLDERS = ("40K", "images", "FLICKR-AES-001")
MIN_LIKED_SCORE = 4.0
COLUMNS = {
    "worker": ("worker", "worker_id", "user"),
    "picture": ("imagepair", "image", "image_name"),
    "score": ("score",),
}


def read(folder: Path, data: PersonalizeData, limit: int | None) -> CollectionRecords:
    """Read FLICKR-AES: the images that each worker scored highly, in turn as target and as history."""
    base = find_image_root(folder, data)
    # One of these folders may lie in another, as in images/40K.
    image_folder = find_subfolder(find_subfolder(base, *IMAGE_FOLDERS), *IMAGE_FOLDERS).relative_to(base)
    table = find_file(folder, TABLE_FILE)
    scores: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    bad_records: list[tuple[str, Record | BadRecord]] = []
    for line, row in _read_rows(table):
        if isinstance(row, BadRecord):
            bad_records.append((f"{table.name}:{line}", row))
        else:
            worker, image, score = row
            scores[worker][image].append(score)
    min_score = MIN_LIKED_SCORE if data.min_score is None else data.min_score
    length = data.history_length or DEFAULT_HISTORY_LENGTH
    records = list(bad_records)
    num_skipped_workers, num_skipped_images = 0, 0
    for worker in sorted(scores):
        # Some workers rated the same image twice.
        liked = [name for name, values in scores[worker].items() if math.fsum(values) / len(values) >= min_score]
        if len(liked) <= length:
            num_skipped_workers, num_skipped_images = num_skipped_workers + 1, num_skipped_images + len(liked)
            continue
        items = [_build_item(name, image_folder) for name in shuffle_by_hash(liked, worker)]
        for index in range(length, len(items)):
            record = Record(user=worker, history=tuple(items[index - length : index]), target=items[index])
            records.append((f"{table.name}, worker {worker}, picture {items[index].id}", record))
    reason = f"liked by {num_skipped_workers:,} workers who liked {length} pictures or fewer"
    return CollectionRecords(records, {reason: num_skipped_images} if num_skipped_workers else {})


def _build_item(name: str, folder: Path) -> Item:
    return Item(id=Path(name).stem, image=(folder / name).as_posix())


def _read_rows(table: Path) -> Iterator[tuple[int, tuple[str, str, float] | BadRecord]]:
    """Yield (line, (worker, image, score)); column names and values may have leading spaces."""
    with open_decompressed(table) as stream:
        try:
            text = stream.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{table}: not UTF-8 at byte {error.start}; convert it, for example with iconv -f latin1 -t utf-8"
            ) from error
    lines = text.splitlines()
    header = lines[0] if lines else ""
    delimiter = max(",;\t", key=header.count)
    names = [name.strip().strip('"').lower() for name in header.split(delimiter)]
    column_indices = {
        column: next((names.index(name) for name in synonyms if name in names), None)
        for column, synonyms in COLUMNS.items()
    }
    if None in column_indices.values():
        raise DataError(
            f"{table}, line 1: expected the columns worker, imagePair and score, got {header.strip()[:80]!r}"
        )
    rows = csv.reader(lines[1:], delimiter=delimiter, skipinitialspace=True)
    for cells in rows:
        line = rows.line_num + 1
        if not any(cell.strip() for cell in cells):
            continue
        values = {
            column: cells[index].strip() if index < len(cells) else ""
            for column, index in column_indices.items()
            if index is not None
        }
        yield line, _parse_row(values, f"{table}, line {line}")


def _parse_row(values: dict[str, str], where: str) -> tuple[str, str, float] | BadRecord:
    missing = next((column for column, value in values.items() if not value), None)
    if missing is not None:
        return BadRecord(where, where, f"has no {missing}")
    try:
        score = float(values["score"])
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        return BadRecord(where, where, f"the score {values['score']!r} is not a number")
    return values["worker"], values["picture"], score
