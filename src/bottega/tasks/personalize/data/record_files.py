"""Records of users from files or a published collection: read, checked, and split by user."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import ValidationError

from bottega.config.data import HeldOut, Source, Splitting
from bottega.core.errors import DataError, UsageError
from bottega.data.formats import find_files
from bottega.data.formats.split_names import normalize_split_name
from bottega.data.prepare.tally import Tally
from bottega.data.records.record import BadRecord
from bottega.data.tables.splits import SPLIT_NAMES, SplitTable, assign_splits, hash_key
from bottega.tasks.personalize.config import PersonalizeData
from bottega.tasks.personalize.data.collections import read_collection
from bottega.tasks.personalize.data.records import Item, Record

SPLIT_FILE = re.compile(
    r"(train|training|val|valid|validation|dev|eval|test)(?:[-_]\d+)?\.(?:jsonl|ndjson|json)(?:\.(?:gz|zst|bz2|xz))?",
    re.IGNORECASE,
)
RECORD_KINDS = ("auto", "embedded", "json", "jsonl")
RECORD_KEYS = ", ".join(Record.model_fields)
EXAMPLE = '{"user": "17", "history": [{"id": "a", "caption": "...", "image": "a.png"}], "target": {...}}'
EXPECTED_TYPES: defaultdict[str, str] = defaultdict(
    lambda: "something else",
    {
        "string_type": "text",
        "tuple_type": "a list of items",
        "model_type": "an item such as {id, caption, image}",
        "dict_type": "an object of texts",
    },
)
# (our key, key in files of the published programs). If a record has two keys for one of ours, the later in the list wins.
FOREIGN_KEYS = (("user", "worker_id"), ("user", "user_id"), ("style", "worker_style"), ("style", "user_style"))
FOREIGN_ITEM_KEYS = (("id", "item_id"), ("caption", "caption"), ("image", "image_path"))
SKIP_HINT = "data.bad_records=skip leaves such records out"


class LocatedRecord(NamedTuple):
    """A record with its location, for messages, and the folder of its images."""

    record: Record
    key: str
    """Name that does not depend on where the files are."""
    where: str
    """File and line, for messages."""
    root: Path
    """Folder that the names of its images are relative to."""


@dataclass
class RecordTables:
    """All records by table, with counts of those that were left out."""

    tables: dict[str, list[LocatedRecord]]
    tally: Tally = field(default_factory=Tally)
    notes: list[str] = field(default_factory=list)


class _Location(NamedTuple):
    """Where the records of a table are: in `files`, or if there are none, in the folder of a collection."""

    path: Path
    files: tuple[Path, ...]
    source: Source

    @property
    def root(self) -> Path:
        return self.path.parent if self.files == (self.path,) else self.path


def read_records(data: PersonalizeData) -> RecordTables:
    """Read and check all records; captions and images are checked later."""
    _check_options(data)
    locations = _find_tables(data)
    records = RecordTables({})
    stop = data.bad_records != "skip"
    for table, location in locations.items():
        records.tables[table] = list(_read_table(location, data, records.tally, stop=stop))
    fractions = {
        name: _get_fraction(getattr(data, name)) if name not in locations else None for name in ("validation", "test")
    }
    records.notes += [
        f"{name} is read from {location.path}, so data.{name}.split is not used"
        for name, location in locations.items()
        if name != "train" and _get_fraction(getattr(data, name)) is not None
    ]
    if any(fractions.values()) or (data.split is not None and data.split.folds and "validation" not in locations):
        records.tables = {**_split_by_user(records.tables.pop("train"), data.split, **fractions), **records.tables}
    records.tables = {name: records.tables[name] for name in SPLIT_NAMES if name in records.tables}
    _check_disjoint_users(records.tables)
    return records


def _check_options(data: PersonalizeData) -> None:
    for key in ("sources", "replay", "online", "curriculum"):
        if getattr(data, key) is not None:
            raise UsageError(f"data.{key}: user records come from one source (data.train); remove it")
    if data.split is not None and data.split.by not in ("fraction", "hash", "group"):
        raise UsageError(f"data.split.by={data.split.by}: records are always split by user; use fraction or hash")
    if data.train.kind == "embedded":
        for key in ("collection", "pictures", "captions", "min_score"):
            if getattr(data, key) is not None:
                raise UsageError(
                    f"data.{key}: does not apply to the embedded data; remove it, or give your own data with --data"
                )
    if data.min_score is not None and data.collection != "flickr":
        raise UsageError("data.min_score: applies to data.collection=flickr only; remove it")
    if data.pictures is not None and not Path(data.pictures).expanduser().is_dir():
        raise UsageError(f"data.pictures: {data.pictures} is not a folder; correct it")
    for name in ("train", "validation", "test"):
        source = getattr(data, name)
        if source is not None and source.kind not in RECORD_KINDS:
            raise UsageError(
                f"data.{name}.kind: expected {', '.join(RECORD_KINDS[1:])} for user records, got {source.kind}"
            )


def _get_fraction(held_out: HeldOut | None) -> float | None:
    return held_out.split if held_out is not None and isinstance(held_out.split, float) else None


def _find_tables(data: PersonalizeData) -> dict[str, _Location]:
    """Return the location of each table that is not split off from train."""
    train = _resolve_path(data.train, "train")
    splits = _find_split_files(train) if train.is_dir() else {}
    if train.is_dir() and not splits and data.collection is None:
        raise DataError(
            f"{train} has no train.jsonl or train.json; give a record file, or the layout of the folder with "
            "data.collection=flickr, pog or ser"
        )
    # A folder brings its own splits, as prepared shards do.
    locations = {name: _Location(train, files, data.train) for name, files in splits.items()}
    locations.setdefault("train", _Location(train, () if train.is_dir() else (train,), data.train))
    for name in ("validation", "test"):
        held_out: HeldOut | None = getattr(data, name)
        if held_out is None or isinstance(held_out.split, float):
            continue
        if held_out.path is None and held_out.kind != "embedded":
            split = normalize_split_name(held_out.split) if held_out.split is not None else name
            if split not in splits:
                raise DataError(
                    f"data.{name}: {train} has no split {split}; give a path, or a fraction such as split=0.1"
                )
            locations[name] = locations[split]._replace(source=held_out)
            continue
        path = _resolve_path(held_out, name)
        path_splits = _find_split_files(path) if path.is_dir() else {}
        if path.is_dir() and name not in path_splits and data.collection is None:
            raise DataError(f"data.{name}.path: {path} has no {name}.jsonl; give a record file")
        locations[name] = _Location(path, path_splits.get(name, () if path.is_dir() else (path,)), held_out)
    return locations


def _resolve_path(source: Source, name: str) -> Path:
    if source.kind == "embedded":
        from bottega.data.embedded.sticker_people import materialise_people

        return materialise_people()
    if source.path is None:
        remedy = "with --data PATH" if name == "train" else f"with data.{name}.path=PATH"
        raise UsageError(f"data.{name}.path: missing; give a record file or a folder {remedy}")
    if "://" in source.path:
        from bottega.data.formats.remote import download

        return download(source.path)
    path = Path(source.path).expanduser()
    if not path.exists():
        raise DataError(f"data.{name}.path: {path} does not exist; give a record file or a folder")
    return path


def _find_split_files(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Return the record files of a folder by split: train.jsonl or train-000000.jsonl, val.json, test.jsonl.gz."""
    splits: dict[str, tuple[Path, ...]] = {}
    for path in sorted(folder.iterdir()):
        match = SPLIT_FILE.fullmatch(path.name)
        if match is not None and path.is_file():
            split = normalize_split_name(match[1])
            splits[split] = (*splits.get(split, ()), path)
    return splits if "train" in splits else {}


def _read_table(location: _Location, data: PersonalizeData, tally: Tally, *, stop: bool) -> Iterator[LocatedRecord]:
    """Yield the valid records of a table, with their histories cut to data.history_length."""
    first_seen: dict[bytes, str] = {}
    records = _read_files(location.files) if location.files else _read_collection_folder(location, data, tally)
    root = location.root
    if data.pictures is not None and location.source.kind != "embedded":
        root = Path(data.pictures).expanduser()
    num_valid = 0
    for record, key, where in records:
        tally.records += 1
        if isinstance(record, BadRecord):
            tally.count_bad(record, stop=stop)
            continue
        reason = _find_problem(record, where, first_seen)
        if reason is not None:
            tally.count_bad(BadRecord(key, where, reason), stop=stop)
            continue
        num_valid += 1
        yield LocatedRecord(_truncate_history(record, data.history_length), key, where, root)
        if num_valid == location.source.limit:
            break
    if not num_valid:
        raise DataError(f"{location.path} has no records; add some, such as {EXAMPLE}")


def _truncate_history(record: Record, length: int | None) -> Record:
    if length is None or len(record.history) <= length:
        return record
    return record.model_copy(update={"history": record.history[-length:]})


def _read_collection_folder(
    location: _Location, data: PersonalizeData, tally: Tally
) -> Iterator[tuple[Record | BadRecord, str, str]]:
    collection = read_collection(location.path, data, limit=location.source.limit)
    for reason, count in collection.left_out.items():
        tally.dropped[reason] = tally.dropped.get(reason, 0) + count
    yield from ((record, key, f"{location.path}, {key}") for key, record in collection.records)


def _read_files(files: tuple[Path, ...]) -> Iterator[tuple[Record | BadRecord, str, str]]:
    for file in files:
        listing = find_files(Source(path=str(file)))
        if listing.kind not in ("json", "jsonl"):
            raise DataError(f"{file} is of kind {listing.kind}; user records must be JSON lines or a JSON list")
        for piece in listing.list_pieces(64 << 20):
            for row in listing.read(piece):
                yield (row if isinstance(row, BadRecord) else _parse_record(row.fields, row.where)), row.key, row.where


def _parse_record(fields: dict[str, object], where: str) -> Record | BadRecord:
    try:
        return Record.model_validate(_translate_keys(fields))
    except ValidationError as error:
        first_error = error.errors()[0]
        return BadRecord(where, where, f"is not a valid record: {describe_validation_error(first_error)}")


def _translate_keys(fields: dict[str, object]) -> dict[str, object]:
    """Return the fields under our keys if they are in the layout of the programs published for these collections."""
    if "history_items_info" not in fields:
        return fields

    def translate_item(value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {ours: value[key] for ours, key in FOREIGN_ITEM_KEYS if key in value}

    history, record = fields["history_items_info"], {ours: fields[key] for ours, key in FOREIGN_KEYS if key in fields}
    record["history"] = [translate_item(value) for value in history] if isinstance(history, list) else history
    if "target_item_info" in fields:
        record["target"] = translate_item(fields["target_item_info"])
    return record


def describe_validation_error(error: object) -> str:
    """Return one validation error of pydantic as a message."""
    assert isinstance(error, dict)
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        problem = f"{key} is missing" if key in Record.model_fields else f"{key} is missing from an item"
        return f"{problem}; a record looks like {EXAMPLE}"
    if error["type"] == "extra_forbidden":
        keys = RECORD_KEYS if len(error["loc"]) == 1 else ", ".join(Item.model_fields)
        return f"{key} is not a known key; the keys are {keys}"
    if error["type"] == "string_too_short":
        return f"{key} is blank"
    value_text = repr(error["input"])
    return f"{key} must be {EXPECTED_TYPES[error['type']]}, not {value_text if len(value_text) <= 40 else value_text[:40] + '...'}"


def _find_problem(record: Record, where: str, first_seen: dict[bytes, str]) -> str | None:
    """Return what is wrong with a record by itself, or that it repeats another; None if it is valid."""
    if not record.history:
        return f"user {record.user!r} has an empty history; a record needs something that was liked; {SKIP_HINT}"
    if record.target.id in {item.id for item in record.history}:
        return f"the target {record.target.id!r} is in the history too, where its caption would be read; {SKIP_HINT}"
    if record.wish is not None and not record.wish.strip():
        return f"the wish is blank; remove it, or describe the image; {SKIP_HINT}"
    digest = hashlib.blake2b(record.model_dump_json().encode("utf-8", "surrogatepass"), digest_size=16).digest()
    if digest in first_seen:
        return f"is the same record as {first_seen[digest]}; {SKIP_HINT}"
    first_seen[digest] = where
    return None


def _split_by_user(
    records: list[LocatedRecord], options: Splitting | None, *, validation: float | None, test: float | None
) -> dict[str, list[LocatedRecord]]:
    """Split records so that all records of a user are in the same table."""
    users = sorted({located.record.user for located in records})
    keys = np.array([hash_key(user) for user in users], dtype=np.uint64)
    options = options or Splitting()
    by_user = options if options.by == "hash" else options.model_copy(update={"by": "fraction"})
    try:
        splits = assign_splits(SplitTable(keys), by_user, validation, test)
    except DataError as error:
        raise DataError(f"{error} (each row is a user)") from None
    split_by_user = dict(zip(users, splits.tolist(), strict=True))
    tables: dict[str, list[LocatedRecord]] = {
        name: [] for split, name in enumerate(SPLIT_NAMES) if split in set(split_by_user.values())
    }
    for located in records:
        tables[SPLIT_NAMES[split_by_user[located.record.user]]].append(located)
    return tables


def _check_disjoint_users(tables: Mapping[str, Iterable[LocatedRecord]]) -> None:
    first_occurrences: dict[str, tuple[str, str]] = {}
    for table, records in tables.items():
        for located in records:
            first_table, where = first_occurrences.setdefault(located.record.user, (table, located.where))
            if first_table != table:
                raise DataError(
                    f"{located.where}: user {located.record.user!r} of {table} is also in {first_table} ({where}); keep each user "
                    "in one split, or the evaluation would be on users seen in training"
                )
