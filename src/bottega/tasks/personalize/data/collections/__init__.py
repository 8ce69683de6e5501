"""Published collections, each from its own layout to records: who liked what, and what they took then."""

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
"""How long histories are where the recipe does not say."""


@dataclass(frozen=True)
class CollectionRecords:
    """What a collection comes to. The order of the rows in its files decides nothing but the order of the records."""

    records: list[tuple[str, Record | BadRecord]]
    """Each with its key, which says where in the folder it is from."""
    left_out: dict[str, int] = field(default_factory=dict)
    """How many rows came to no record, by reason."""


def read_collection(folder: Path, data: PersonalizeData, *, limit: int | None = None) -> CollectionRecords:
    """The records of the folder as `data.collection` publishes it; with `limit` no more than that are needed."""
    assert data.collection is not None, "somebody's own records are read as they are"
    read: Callable[..., CollectionRecords] = import_module(f"{__name__}.{data.collection}").read
    found = read(folder, data, limit)
    if not found.records:
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in found.left_out.items())
        raise DataError(
            f"{folder}: no record comes of it as data.collection={data.collection}: {reasons or 'it is empty'}"
        )
    return found


def image_root(folder: Path, data: PersonalizeData) -> Path:
    """What the names of pictures are relative to."""
    return folder if data.pictures is None else Path(data.pictures).expanduser()


def find_subfolder(base: Path, *names: str) -> Path:
    """The sub-folder of one of these names, whatever its case; `base` itself where there is none."""
    folders = {path.name.lower(): path for path in sorted(base.iterdir()) if path.is_dir()} if base.is_dir() else {}
    return next((folders[name.lower()] for name in names if name.lower() in folders), base)


def find_file(folder: Path, name: str) -> Path:
    """A file of the published layout, in the folder or one level below."""
    found = next((path for path in (folder / name, *sorted(folder.glob(f"*/{name}"))) if path.is_file()), None)
    if found is None:
        raise DataError(f"{folder} has no {name}; give the folder as it is published, or a record file")
    return found


def shuffle_by_hash(names: Iterable[str], *of: str) -> list[str]:
    """In an order that is a function of the names alone, so that the order of the rows in a file does not matter."""
    return sorted(names, key=lambda name: (hash_key("\0".join((*of, name))), name))
