"""Records of people, from files or a published collection: read, checked, and divided by person."""

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
from bottega.data.tables.splits import NAMES, SplitTable, assign_splits, hash_key
from bottega.tasks.personalize.config import PersonalizeData
from bottega.tasks.personalize.data.collections import read_collection
from bottega.tasks.personalize.data.records import Item, Record

PART = re.compile(
    r"(train|training|val|valid|validation|dev|eval|test)(?:[-_]\d+)?\.(?:jsonl|ndjson|json)(?:\.(?:gz|zst|bz2|xz))?",
    re.IGNORECASE,
)
KINDS = ("auto", "embedded", "json", "jsonl")
KEYS = ", ".join(Record.model_fields)
EXAMPLE = '{"user": "17", "history": [{"id": "a", "caption": "...", "image": "a.png"}], "target": {...}}'
EXPECTED: defaultdict[str, str] = defaultdict(
    lambda: "something else",
    {
        "string_type": "text",
        "tuple_type": "a list of items",
        "model_type": "an item such as {id, caption, image}",
        "dict_type": "an object of texts",
    },
)
# Of two names for one of ours, the later wins.
THEIRS = (("user", "worker_id"), ("user", "user_id"), ("style", "worker_style"), ("style", "user_style"))
THEIR_ITEM = (("id", "item_id"), ("caption", "caption"), ("image", "image_path"))
SKIP_HINT = "data.bad_records=skip leaves such records out"


class LocatedRecord(NamedTuple):
    """A record with the places it has: where it stands, and what the names of its pictures are relative to."""

    record: Record
    key: str
    """Its name wherever the files lie."""
    where: str
    root: Path


@dataclass
class RecordTables:
    """Everybody, by table. What was left out is counted."""

    tables: dict[str, list[LocatedRecord]]
    tally: Tally = field(default_factory=Tally)
    notes: list[str] = field(default_factory=list)


class _Place(NamedTuple):
    """Where the records of a table are: in record files, or in the folder of a collection where there are none."""

    path: Path
    files: tuple[Path, ...]
    source: Source

    @property
    def root(self) -> Path:
        return self.path.parent if self.files == (self.path,) else self.path


def read_records(data: PersonalizeData) -> RecordTables:
    """Each record checked as far as it can be without its captions and pictures."""
    _check_options(data)
    found = _places(data)
    people = RecordTables({})
    stop = data.bad_records != "skip"
    for table, place in found.items():
        people.tables[table] = list(_persons(place, data, people.tally, stop=stop))
    shares = {name: _share(getattr(data, name)) if name not in found else None for name in ("validation", "test")}
    people.notes += [
        f"{name} is {place.path}, which is there already, and no share of train"
        for name, place in found.items()
        if name != "train" and _share(getattr(data, name)) is not None
    ]
    if any(shares.values()) or (data.split is not None and data.split.folds and "validation" not in found):
        people.tables = {**_divided(people.tables.pop("train"), data.split, **shares), **people.tables}
    people.tables = {name: people.tables[name] for name in NAMES if name in people.tables}
    _check_apart(people.tables)
    return people


def _check_options(data: PersonalizeData) -> None:
    for key in ("sources", "replay", "online", "curriculum"):
        if getattr(data, key) is not None:
            raise UsageError(f"data.{key}: records of people come from one source (data.train); leave it out")
    if data.split is not None and data.split.by not in ("fraction", "hash", "group"):
        raise UsageError(f"data.split.by={data.split.by}: people are always split by user; say fraction or hash")
    if data.train.kind == "embedded":
        for key in ("collection", "pictures", "captions", "min_score"):
            if getattr(data, key) is not None:
                raise UsageError(
                    f"data.{key}: is of data that is given with --data, and this is embedded; leave it out"
                )
    if data.min_score is not None and data.collection != "flickr":
        raise UsageError("data.min_score: points are given in the collection flickr alone; leave it out")
    if data.pictures is not None and not Path(data.pictures).expanduser().is_dir():
        raise UsageError(f"data.pictures: {data.pictures} is not a folder here; correct it")
    for name in ("train", "validation", "test"):
        part = getattr(data, name)
        if part is not None and part.kind not in KINDS:
            raise UsageError(f"data.{name}.kind: records of people are of kind {', '.join(KINDS[1:])}; got {part.kind}")


def _share(part: HeldOut | None) -> float | None:
    return part.split if part is not None and isinstance(part.split, float) else None


def _places(data: PersonalizeData) -> dict[str, _Place]:
    """Where each table is read from; those that are shares of train are not there."""
    train = _path(data.train, "train")
    parts = _parts(train) if train.is_dir() else {}
    if train.is_dir() and not parts and data.collection is None:
        raise DataError(
            f"{train} holds no train.jsonl or train.json; name a record file, or say whose layout it has with "
            "data.collection=flickr, pog or ser"
        )
    # A folder brings its own parts, as prepared shards do.
    found = {name: _Place(train, files, data.train) for name, files in parts.items()}
    found.setdefault("train", _Place(train, () if train.is_dir() else (train,), data.train))
    for name in ("validation", "test"):
        part: HeldOut | None = getattr(data, name)
        if part is None or isinstance(part.split, float):
            continue
        if part.path is None and part.kind != "embedded":
            wanted = normalize_split_name(part.split) if part.split is not None else name
            if wanted not in parts:
                raise DataError(f"data.{name}: {train} has no part {wanted}; give a path, or a share such as split=0.1")
            found[name] = found[wanted]._replace(source=part)
            continue
        path = _path(part, name)
        inside = _parts(path) if path.is_dir() else {}
        if path.is_dir() and name not in inside and data.collection is None:
            raise DataError(f"data.{name}.path: {path} holds no {name}.jsonl; name a record file")
        found[name] = _Place(path, inside.get(name, () if path.is_dir() else (path,)), part)
    return found


def _path(source: Source, name: str) -> Path:
    if source.kind == "embedded":
        from bottega.data.embedded.sticker_people import materialise_people

        return materialise_people()
    if source.path is None:
        remedy = "with --data PATH" if name == "train" else f"with data.{name}.path=PATH"
        raise UsageError(f"data.{name}.path: missing; name a record file or a folder {remedy}")
    if "://" in source.path:
        from bottega.data.formats.remote import download

        return download(source.path)
    path = Path(source.path).expanduser()
    if not path.exists():
        raise DataError(f"data.{name}.path: {path} does not exist; name a record file or a folder")
    return path


def _parts(folder: Path) -> dict[str, tuple[Path, ...]]:
    """The record files of a folder by part: train.jsonl or train-000000.jsonl, val.json, test.jsonl.gz."""
    found: dict[str, tuple[Path, ...]] = {}
    for path in sorted(folder.iterdir()):
        match = PART.fullmatch(path.name)
        if match is not None and path.is_file():
            part = normalize_split_name(match[1])
            found[part] = (*found.get(part, ()), path)
    return found if "train" in found else {}


def _persons(place: _Place, data: PersonalizeData, tally: Tally, *, stop: bool) -> Iterator[LocatedRecord]:
    """The good ones of a place, histories cut to their ends."""
    seen: dict[bytes, str] = {}
    records = _of_files(place.files) if place.files else _of_collection(place, data, tally)
    root = place.root
    if data.pictures is not None and place.source.kind != "embedded":
        root = Path(data.pictures).expanduser()
    given = 0
    for record, key, where in records:
        tally.records += 1
        if isinstance(record, BadRecord):
            tally.count_bad(record, stop=stop)
            continue
        reason = _problem(record, where, seen)
        if reason is not None:
            tally.count_bad(BadRecord(key, where, reason), stop=stop)
            continue
        given += 1
        yield LocatedRecord(_shortened(record, data.history_length), key, where, root)
        if given == place.source.limit:
            break
    if not given:
        raise DataError(f"{place.path} holds no records; one is such as {EXAMPLE}")


def _shortened(record: Record, length: int | None) -> Record:
    if length is None or len(record.history) <= length:
        return record
    return record.model_copy(update={"history": record.history[-length:]})


def _of_collection(place: _Place, data: PersonalizeData, tally: Tally) -> Iterator[tuple[Record | BadRecord, str, str]]:
    found = read_collection(place.path, data, limit=place.source.limit)
    for reason, count in found.left_out.items():
        tally.dropped[reason] = tally.dropped.get(reason, 0) + count
    yield from ((record, key, f"{place.path}, {key}") for key, record in found.records)


def _of_files(files: tuple[Path, ...]) -> Iterator[tuple[Record | BadRecord, str, str]]:
    for file in files:
        found = find_files(Source(path=str(file)))
        if found.kind not in ("json", "jsonl"):
            raise DataError(f"{file} is of kind {found.kind}; records of people are JSON lines or a JSON list")
        for piece in found.list_pieces(64 << 20):
            for row in found.read(piece):
                yield (row if isinstance(row, BadRecord) else _record(row.fields, row.where)), row.key, row.where


def _record(fields: dict[str, object], where: str) -> Record | BadRecord:
    try:
        return Record.model_validate(_respelt(fields))
    except ValidationError as error:
        first = error.errors()[0]
        return BadRecord(where, where, f"is no record: {describe_validation_error(first)}")


def _respelt(fields: dict[str, object]) -> dict[str, object]:
    """Under our names, where the record is spelt as the published programs for these collections write it."""
    if "history_items_info" not in fields:
        return fields

    def item(value: object) -> object:
        return {ours: value[key] for ours, key in THEIR_ITEM if key in value} if isinstance(value, dict) else value

    history, record = fields["history_items_info"], {ours: fields[key] for ours, key in THEIRS if key in fields}
    record["history"] = [item(one) for one in history] if isinstance(history, list) else history
    if "target_item_info" in fields:
        record["target"] = item(fields["target_item_info"])
    return record


def describe_validation_error(error: object) -> str:
    """One problem that pydantic found, as we say it."""
    assert isinstance(error, dict)
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        what = f"{key} is missing" if key in Record.model_fields else f"{key} is missing from an item"
        return f"{what}; one is such as {EXAMPLE}"
    if error["type"] == "extra_forbidden":
        known = KEYS if len(error["loc"]) == 1 else ", ".join(Item.model_fields)
        return f"{key} is no key of it; there is {known}"
    if error["type"] == "string_too_short":
        return f"{key} is blank"
    shown = repr(error["input"])
    return f"{key} must be {EXPECTED[error['type']]}, not {shown if len(shown) <= 40 else shown[:40] + '...'}"


def _problem(record: Record, where: str, seen: dict[bytes, str]) -> str | None:
    """What is wrong with a record by itself, or among the others."""
    if not record.history:
        return f"user {record.user!r} has an empty history; a record needs something that was liked; {SKIP_HINT}"
    if record.target.id in {item.id for item in record.history}:
        return f"the target {record.target.id!r} is in the history too, where its caption would be read; {SKIP_HINT}"
    if record.wish is not None and not record.wish.strip():
        return f"the wish is blank; leave it out, or say what is wished; {SKIP_HINT}"
    digest = hashlib.blake2b(record.model_dump_json().encode("utf-8", "surrogatepass"), digest_size=16).digest()
    if digest in seen:
        return f"is the same record as {seen[digest]}; {SKIP_HINT}"
    seen[digest] = where
    return None


def _divided(
    people: list[LocatedRecord], options: Splitting | None, *, validation: float | None, test: float | None
) -> dict[str, list[LocatedRecord]]:
    """By user: whose record is learnt from is not measured with."""
    users = sorted({person.record.user for person in people})
    keys = np.array([hash_key(user) for user in users], dtype=np.uint64)
    options = options or Splitting()
    by_user = options if options.by == "hash" else options.model_copy(update={"by": "fraction"})
    try:
        sides = assign_splits(SplitTable(keys), by_user, validation, test)
    except DataError as error:
        raise DataError(f"{error} (a row is a user here)") from None
    side_of = dict(zip(users, sides.tolist(), strict=True))
    tables: dict[str, list[LocatedRecord]] = {
        name: [] for side, name in enumerate(NAMES) if side in set(side_of.values())
    }
    for person in people:
        tables[NAMES[side_of[person.record.user]]].append(person)
    return tables


def _check_apart(tables: Mapping[str, Iterable[LocatedRecord]]) -> None:
    first: dict[str, tuple[str, str]] = {}
    for table, people in tables.items():
        for person in people:
            known, where = first.setdefault(person.record.user, (table, person.where))
            if known != table:
                raise DataError(
                    f"{person.where}: user {person.record.user!r} of {table} is in {known} as well ({where}); a person "
                    "belongs to one of them, or what is measured was learnt"
                )
