"""A folder of prepared tables, and what is known about them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bottega.config.data import Data, Deduplication, Splitting
from bottega.core.errors import DataError, UsageError
from bottega.data.prepare.encode import EncodeJobs, encode_tables
from bottega.data.prepare.encoder import Encoder
from bottega.data.prepare.inputs import Input, Item, Shares, group_into_jobs, list_items
from bottega.data.prepare.jobs import ProgressCallback
from bottega.data.prepare.rules import OTHER_CLASS, Rules
from bottega.data.prepare.scan import Decisions, ScanJobs, decide_tables
from bottega.data.prepare.scored_encoder import ScoredEncoder
from bottega.data.tables.cache import find_damage, get_or_build
from bottega.data.tables.classes import Classes, find_classes_if_labelled, read_text_column
from bottega.data.tables.shards import Table
from bottega.data.text.tokenizer import Tokenizer
from bottega.storage.durable import flush_all, write_atomic

META = "meta.json"
WORK = ("scan", "decisions", "parts")
"""Folders of a preparation under way."""
# The folder may come from anywhere, and its tables are opened by these names.
_TABLE = re.compile(r"train(\.\d+)?|validation|test|replay").fullmatch
# Raised when the same inputs would give other files, so that old entries are left alone.
FORMAT = 4


@dataclass(frozen=True)
class PreparedData:
    """Tables in `folder`. The fingerprint is a hash of all they were made from."""

    folder: Path
    fingerprint: str
    unread_splits: tuple[str, ...] = ()
    """Parts of the folder that train is a part of, and that nothing reads. The same rows may come from a file that has no
    parts, so this is not kept with them."""
    held_out_hashes: Mapping[str, str] = field(default_factory=dict, compare=False)
    """validation and test -> hash of the files that their rows come from; empty where that was not recorded."""

    @cached_property
    def metadata(self) -> dict[str, Any]:
        return json.loads((self.folder / META).read_bytes())

    @property
    def tables(self) -> dict[str, dict[str, int]]:
        """What each table holds, in numbers."""
        return self.metadata["tables"]

    @property
    def training_tables(self) -> list[str]:
        return [name for name in self.tables if name.startswith("train")]

    def table(self, name: str) -> Table:
        return Table(self.folder / name)

    def notes(self) -> list[str]:
        """What was left out, in words."""
        meta = self.metadata
        lines = []
        if self.unread_splits:
            names, one = ", ".join(self.unread_splits), self.unread_splits[0]
            lines.append(f"only the part train is read, not {names}; data.{one}.split={one} would read that")
        dropped = {reason: count for reason, count in meta["dropped"].items() if reason != OTHER_CLASS}
        lines += [f"{count:,} records left out: {reason}" for reason, count in sorted(dropped.items())]
        if meta["bad"]:
            lines.append(
                f"{meta['bad']:,} of {meta['records']:,} records left out as bad; the first: {meta['named'][0]}"
            )
        return [*lines, *meta.get("notes", ())]

    @cached_property
    def classes(self) -> Classes:
        return Classes(tuple(self.metadata.get("classes") or ()))

    def hash_samples(self, table: str) -> str:
        """Return a hash of which samples with which labels a table holds, whatever else is read of them."""
        columns, digest = self.table(table), hashlib.sha256()
        for name in ("key", "label"):
            if name in columns.columns:
                digest.update(f"{name} {len(columns)}\0".encode())
                digest.update(
                    np.ascontiguousarray(columns.ends(name)).tobytes() if columns.columns[name].varying else b""
                )
                digest.update(np.ascontiguousarray(columns.values(name)).tobytes())
        return digest.hexdigest()[:32]

    def class_ids(self, table: str) -> np.ndarray | None:
        """The class number of each row; None where there are no classes."""
        return self.classes.ids(list(_column(self.table(table), "label"))) if len(self.classes) else None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder / "tokenizer")


@dataclass(frozen=True)
class PreparationPlan:
    """One preparation: what is read, what is done with it, and how it is encoded."""

    task: str
    inputs: tuple[Input, ...]
    shares: Shares
    data: Data
    rules: Rules
    encoder: Callable[[PlannedTexts, Path, ProgressCallback], Encoder]
    """Made when the records are known to be there, since it may learn from them (a tokenizer)."""
    options: tuple[Any, ...]
    """Whatever else decides what is written, with a stable text form."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What a reader of the tables must know besides."""
    label_field: str | None = None
    num_classes: int | None = None
    """Declared by the recipe; None counts them in the data."""
    needs_classes: bool = False
    """Whether a record without a label is an error."""
    deduplicate: Deduplication | None = None

    @property
    def tables(self) -> tuple[str, ...]:
        named = [input.table for input in self.inputs]
        shared = [name for name in ("validation", "test") if getattr(self.shares, name)]
        folds = ["validation"] if self.data.split is not None and self.data.split.folds else []
        return tuple(dict.fromkeys([*named, *shared, *folds]))

    @cached_property
    def key(self) -> str:
        inputs = [(*_named(input), input.table, input.is_split, *_chosen(input)) for input in self.inputs]
        parts = (FORMAT, self.task, inputs, self.shares, self.data.split, self.rules, self.deduplicate)
        labels = (self.label_field, self.num_classes, self.needs_classes)
        policy = (self.stop_on_bad, self.data.max_bad, *labels, self.score_field, *self.rules.class_names_key)
        # Another Python may know other characters.
        is_ruled = self.rules.clean or self.rules.filter or self.deduplicate
        tables = unicodedata.unidata_version if is_ruled else None
        return hashlib.sha256(repr((parts, policy, self.options, tables)).encode()).hexdigest()[:32]

    @property
    def held_out_hashes(self) -> dict[str, str]:
        """validation and test -> hash of the files that their rows come from, however these are read."""
        found: dict[str, str] = {}
        for name in (table for table in ("validation", "test") if table in self.tables):
            has_own = any(input.table == name for input in self.inputs)
            sources = [input.found for input in self.inputs if (input.table == name if has_own else input.is_split)]
            found[name] = hashlib.sha256("\n".join(source.content for source in sources).encode()).hexdigest()[:32]
        return found

    @property
    def score_field(self) -> str | None:
        """The field that a curriculum goes by, where it is none of those that are computed."""
        curriculum = self.data.curriculum
        return curriculum.by if curriculum is not None and curriculum.by not in ("length", "rarity") else None

    @property
    def stop_on_bad(self) -> bool:
        """What a bad record does: media are many and now and then one is cut short, a broken row is a mistake."""
        if self.data.bad_records is not None:
            return self.data.bad_records == "stop"
        return not all(input.found.is_media for input in self.inputs)


def _named(input: Input) -> tuple[str, str | tuple[str, ...] | None, str | None]:
    """A source by its content and the fields that are read of it."""
    source = input.found.source
    return input.found.fingerprint, source.field, source.label


def _chosen(input: Input) -> tuple[Any, ...]:
    """What only some inputs say; data without it has the name that it had before this could be said."""
    labels, number = input.found.source.labels, input.source
    if labels is None and number is None:
        return ()
    return (labels, number, "own share") if number is not None and input.is_split else (labels, number)


@dataclass(frozen=True)
class PlannedTexts:
    """The planned work, for those who must see the texts before they are encoded."""

    plan: PreparationPlan
    jobs: tuple[tuple[Item, ...], ...]
    decisions: Decisions | None


def prepare(
    plan: PreparationPlan, *, cache: Path, progress: ProgressCallback = lambda stage, done, total: None
) -> PreparedData:
    """The prepared folder of a plan, made where it is not there yet. Many processes may call at once."""
    for input in plan.inputs:
        input.found.hash_files(progress)
    folder = get_or_build(cache, plan.key, lambda folder: _build(plan, folder, progress))
    return PreparedData(folder, plan.key, _unread_parts(plan.inputs), plan.held_out_hashes)


def open_prepared(folder: Path, *, task: str) -> PreparedData:
    """A folder that `bottega prepare --out` wrote, here or elsewhere."""
    try:
        meta = json.loads((folder / META).read_bytes())
        made_for, version, key = meta["task"], meta["format"], meta["key"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{folder} is no prepared data: {META} cannot be read") from error
    if (made_for, version) != (task, FORMAT):
        raise DataError(
            f"{folder} was prepared for {made_for} in form {version}; {task} in form {FORMAT} was asked for: prepare the "
            "data again"
        )
    problem = find_damage(folder) or next(
        (f"{name!r} is no table" for name in meta["tables"] if not _TABLE(name)), None
    )
    if problem is not None:
        raise DataError(f"{folder} is damaged: {problem}; copy or prepare it again")
    contents = meta.get("contents")
    return PreparedData(folder, key, held_out_hashes=contents if isinstance(contents, dict) else {})


def is_prepared(folder: Path) -> bool:
    """Whether `bottega prepare --out` wrote it; a folder of texts may hold a meta.json of its own."""
    try:
        return {"format", "task", "key", "tables"} <= json.loads((folder / META).read_bytes()).keys()
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def open_if_prepared(data: Data, *, task: str) -> PreparedData | None:
    """The recipe's training data where that is a prepared folder already."""
    path = Path(data.train.path).expanduser() if data.train.path is not None else None
    if data.train.kind == "shards" and path is None:
        raise UsageError("data.train.kind: shards needs a path, a folder that `bottega prepare --out` wrote")
    if path is not None and (data.train.kind == "shards" or (data.train.kind == "auto" and is_prepared(path))):
        for key in ("replay", "split", "clean", "filter", "deduplicate"):
            if getattr(data, key, None) is not None:
                raise UsageError(f"data.{key}: {path} holds shards, which are prepared already; leave it out")
        ready = open_prepared(path, task=task)
        for name, part in (("validation", data.validation), ("test", data.test)):
            if part is not None and part.path is not None:
                raise UsageError(f"data.{name}.path: {path} holds shards, which bring their own; leave it out")
            if part is not None and name == "test" and name not in ready.tables:
                raise UsageError(f"data.{name}: {path} holds none; prepare it again with one, or leave it out")
        return ready
    return None


def _build(plan: PreparationPlan, folder: Path, progress: ProgressCallback) -> None:
    """Parts are removed only when all else is done, so that a kill at any moment costs little."""
    if not (folder / META).is_file():
        _make_tables(plan, folder, progress)
    for left in WORK:
        shutil.rmtree(folder / left, ignore_errors=True)


def _make_tables(plan: PreparationPlan, folder: Path, progress: ProgressCallback) -> None:
    # The end of a single text is a cut of its bytes, which nobody has to scan for.
    items = list_items(plan.inputs, plan.shares, cut_single_text=plan.data.split is None)
    jobs = group_into_jobs(items, plan.inputs)
    sizes = tuple(sum(item.bytes for item in job) for job in jobs)
    decisions = _decisions(plan, jobs, sizes, folder, progress)
    encoder = plan.encoder(PlannedTexts(plan, jobs, decisions), folder, progress)
    if plan.score_field is not None:
        encoder = ScoredEncoder(encoder, plan.score_field)
    work = EncodeJobs(
        plan.inputs,
        jobs,
        folder / "parts",
        sizes,
        plan.rules,
        encoder,
        plan.tables,
        decisions,
        stop_on_bad=plan.stop_on_bad,
    )
    known = encode_tables(work, folder, max_bad=plan.data.max_bad, progress=progress)
    for name, count in (decisions.dropped if decisions else {}).items():
        known["dropped"][name] = count
    classes = None
    if "label" in encoder.columns:
        _check_labels(plan, folder)
        classes = _classes(plan, folder, known["tables"])
    meta = {
        "format": FORMAT,
        "task": plan.task,
        "key": plan.key,
        "contents": plan.held_out_hashes,
        **known,
        "classes": classes,
        **plan.metadata,
        **encoder.metadata,
    }
    _check_unchanged(plan)
    for table in known["tables"]:
        flush_all(folder / table)
    write_atomic(folder / META, json.dumps(meta, indent=1))


def _unread_parts(inputs: tuple[Input, ...]) -> tuple[str, ...]:
    read = {input.found.split_name for input in inputs}
    beside_train = {part for input in inputs if input.table.startswith("train") for part in input.found.other_splits}
    return tuple(sorted(beside_train - read))


def _check_unchanged(plan: PreparationPlan) -> None:
    """What was read must be what the key says: hashes are remembered, so this costs a look at each file's times."""
    for input in plan.inputs:
        again = replace(input.found)
        if again.fingerprint != input.found.fingerprint:
            raise DataError(f"{input.found.root} changed while it was read; prepare it again when it is complete")


def _classes(plan: PreparationPlan, folder: Path, tables: Iterable[str]) -> list[str]:
    """The classes of all tables, in order; a label that is none of them is an error now and not in training."""
    first_of: dict[str, str] = {}
    for name in tables:
        table = Table(folder / name)
        for number, label in enumerate(_column(table, "label")):
            if label not in first_of:
                first_of[label] = table.row("key", number)
    classes = find_classes_if_labelled(first_of, num_classes=plan.num_classes, required=plan.needs_classes)
    if len(classes):
        classes.ids(list(first_of), keys=list(first_of.values()))
    return list(classes.names)


def _check_labels(plan: PreparationPlan, folder: Path) -> None:
    """A class that is asked for and occurs nowhere is a slip."""
    for input in plan.inputs:
        labels = input.found.source.labels
        if labels is None or not input.table.startswith("train"):
            continue
        found = set(read_text_column(Table(folder / input.table), "label"))
        wrong = [label for label in labels if label not in found]
        if wrong:
            raise DataError(
                f"{input.found.root}: no record is of the class {wrong[0]!r} that labels asks for; of those asked for there "
                f"is {', '.join(sorted(found))}"
            )


def _column(table: Table, name: str) -> Iterator[str]:
    return (table.row(name, number) for number in range(len(table)))


def _decisions(
    plan: PreparationPlan,
    jobs: tuple[tuple[Item, ...], ...],
    sizes: tuple[int, ...],
    folder: Path,
    progress: ProgressCallback,
) -> Decisions | None:
    undecided = any(item.table is None and plan.inputs[item.input].is_split for job in jobs for item in job)
    if not undecided and plan.deduplicate is None:
        return None
    scan = ScanJobs(
        plan.inputs,
        jobs,
        folder / "scan",
        sizes,
        plan.rules,
        plan.data.split or Splitting(),
        plan.label_field,
        plan.deduplicate,
        stop_on_bad=plan.stop_on_bad,
        by_length=plan.task == "language",
    )
    return decide_tables(scan, plan.shares, plan.tables, max_bad=plan.data.max_bad, progress=progress)
