"""Published data sets of users and liked images, each converted from its own layout to records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from bottega.core.errors import DataError
from bottega.data.records.record import BadRecord
from bottega.data.tables.splits import hash_key
from bottega.tasks.personalize.config import PersonalizeData
from bottega.tasks.personalize.data.records import Record

DEFAULT_HISTORY_LENGTH = 10
"""Length of histories if the recipe has no data.history_length."""


@dataclass(frozen=True)
class CollectionRecords:
    """The records of a collection; the order of rows in its files affects only the order of the records."""

    records: list[tuple[str, Record | BadRecord]]
    """Key and record; the key is the location of the record in the folder."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of rows without a record, by reason."""


def read_collection(folder: Path, data: PersonalizeData, *, limit: int | None = None) -> CollectionRecords:
    """Return the records of a folder in the layout of `data.collection`; at most `limit` are needed."""
    assert data.collection is not None, "without a collection, record files are read"
    read: Callable[..., CollectionRecords] = import_module(f"{__name__}.{data.collection}").read
    collection = read(folder, data, limit)
    if not collection.records:
        reasons = "; ".join(f"{count:,} rows left out: {reason}" for reason, count in collection.left_out.items())
        raise DataError(f"{folder} has no records for data.collection={data.collection}: {reasons or 'it is empty'}")
    return collection


def find_image_root(folder: Path, data: PersonalizeData) -> Path:
    """Return the folder that image names are relative to."""
    return folder if data.pictures is None else Path(data.pictures).expanduser()


def find_subfolder(base: Path, *names: str) -> Path:
    """Return the subfolder with one of these names, ignoring case, or `base` itself if there is none."""
    folders = {path.name.lower(): path for path in sorted(base.iterdir()) if path.is_dir()} if base.is_dir() else {}
    return next((folders[name.lower()] for name in names if name.lower() in folders), base)


def find_file(folder: Path, name: str) -> Path:
    """Return a file of the published layout, in the folder or one level below."""
    candidates = (folder / name, *sorted(folder.glob(f"*/{name}")))
    file = next((path for path in candidates if path.is_file()), None)
    if file is None:
        raise DataError(f"{folder} has no {name}; give the folder as it is published, or a record file")
    return file


def shuffle_by_hash(names: Iterable[str], *salts: str) -> list[str]:
    """Return the names in an order that depends on the names and salts alone, not on the order of the rows in a file."""
    return sorted(names, key=lambda name: (hash_key("\0".join((*salts, name))), name))
