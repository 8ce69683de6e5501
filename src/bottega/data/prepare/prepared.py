"""Prepared data: the plan of a preparation, its execution, and the folder of tables that results."""

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

from bottega.config.data import Data, Deduplication, ExactDeduplication, Splitting
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
from bottega.redaction import redact_values
from bottega.storage.durable import flush_all, write_atomic

META_FILE = "meta.json"
WORK_FOLDERS = ("scan", "decisions", "parts")
"""Temporary folders of a preparation."""
# Allowed names of tables: the folder may come from anywhere.
_IS_TABLE_NAME = re.compile(r"train(\.\d+)?|validation|test|replay").fullmatch
# Part of the key; increased whenever the same inputs would give different files.
FORMAT_VERSION = 4


@dataclass(frozen=True)
class PreparedData:
    """The prepared tables in `folder`. The fingerprint is a hash of all inputs."""

    folder: Path
    fingerprint: str
    unread_splits: tuple[str, ...] = ()
    """Splits beside train that are not read. Not stored with the tables, since the same rows may come from a plain file."""
    held_out_hashes: Mapping[str, str] = field(default_factory=dict, compare=False)
    """validation and test -> hash of the files their rows come from; empty if it was not recorded."""

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The content of meta.json."""
        return json.loads((self.folder / META_FILE).read_bytes())

    @property
    def tables(self) -> dict[str, dict[str, int]]:
        """Counts of each table."""
        return self.metadata["tables"]

    @property
    def training_tables(self) -> list[str]:
        """Names of the tables to train on, one for each source."""
        return [name for name in self.tables if name.startswith("train")]

    def table(self, name: str) -> Table:
        return Table(self.folder / name)

    def notes(self) -> list[str]:
        """Return notes on what was left out."""
        meta = self.metadata
        lines = []
        if self.unread_splits:
            names, split = ", ".join(self.unread_splits), self.unread_splits[0]
            lines.append(f"only the split train is read, not {names}; set data.{split}.split={split} to use it")
        dropped = {reason: count for reason, count in meta["dropped"].items() if reason != OTHER_CLASS}
        lines += [f"{count:,} records dropped: {reason}" for reason, count in sorted(dropped.items())]
        if meta["bad"]:
            lines.append(
                f"{meta['bad']:,} of {meta['records']:,} records dropped as bad; the first is {meta['named'][0]}"
            )
        return [*lines, *meta.get("notes", ())]

    @cached_property
    def classes(self) -> Classes:
        """The classes of the labels; empty if the data has no labels."""
        return Classes(tuple(self.metadata.get("classes") or ()))

    def hash_samples(self, table: str) -> str:
        """Return a hash of the keys and labels of a table."""
        rows, digest = self.table(table), hashlib.sha256()
        for name in ("key", "label"):
            if name in rows.columns:
                digest.update(f"{name} {len(rows)}\0".encode())
                digest.update(np.ascontiguousarray(rows.ends(name)).tobytes() if rows.columns[name].varying else b"")
                digest.update(np.ascontiguousarray(rows.values(name)).tobytes())
        return digest.hexdigest()[:32]

    def class_ids(self, table: str) -> np.ndarray | None:
        """Return the class id of each row, or None without classes."""
        return self.classes.ids(list(_iterate_column(self.table(table), "label"))) if len(self.classes) else None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the texts were encoded with."""
        return Tokenizer.load(self.folder / "tokenizer")


@dataclass(frozen=True)
class PreparationPlan:
    """One preparation: its inputs, the rules for records, and the encoder."""

    task: str
    inputs: tuple[Input, ...]
    split_fractions: Shares
    data: Data
    rules: Rules
    build_encoder: Callable[[PlannedTexts, Path, ProgressCallback], Encoder]
    """Called once the records are known, since it may train a tokenizer on them."""
    options: tuple[Any, ...]
    """All other values that affect the tables; their repr is part of the key."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Additional values for meta.json."""
    label_field: str | None = None
    num_classes: int | None = None
    """Number of classes in the recipe; None takes it from the data."""
    needs_classes: bool = False
    """Whether a record without a label is an error."""
    deduplicate: Deduplication | ExactDeduplication | None = None
    content_encoder: Encoder | None = None
    """Encoder whose rows are compared to find duplicates; None compares texts. It does not change the key, since `options` has it."""

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables to write."""
        tables = [input.table for input in self.inputs]
        held_out = [name for name in ("validation", "test") if getattr(self.split_fractions, name)]
        fold_tables = ["validation"] if self.data.split is not None and self.data.split.folds else []
        return tuple(dict.fromkeys([*tables, *held_out, *fold_tables]))

    @cached_property
    def key(self) -> str:
        """Hash of everything that affects the tables."""
        inputs = [(*_content_key(input), input.table, input.is_split, *_selection_key(input)) for input in self.inputs]
        parts = (FORMAT_VERSION, self.task, inputs, self.split_fractions, self.data.split, self.rules, self.deduplicate)
        labels = (self.label_field, self.num_classes, self.needs_classes)
        policy = (self.stop_on_bad, self.data.max_bad, *labels, self.score_field, *self.rules.class_names_key)
        # The Unicode database, which depends on the version of Python, affects cleaning, filtering and deduplication.
        is_text_changed = self.rules.clean or self.rules.filter or self.deduplicate
        unicode_version = unicodedata.unidata_version if is_text_changed else None
        return hashlib.sha256(repr((parts, policy, self.options, unicode_version)).encode()).hexdigest()[:32]

    @property
    def held_out_hashes(self) -> dict[str, str]:
        """validation and test -> hash of the files their rows come from; options of reading them do not change it."""
        hashes: dict[str, str] = {}
        for name in (table for table in ("validation", "test") if table in self.tables):
            has_own = any(input.table == name for input in self.inputs)
            sources = [
                input.source_files for input in self.inputs if (input.table == name if has_own else input.is_split)
            ]
            hashes[name] = hashlib.sha256("\n".join(source.content_hash for source in sources).encode()).hexdigest()[
                :32
            ]
        return hashes

    @property
    def score_field(self) -> str | None:
        """The field of a curriculum's scores; None if they are computed, or there is no curriculum."""
        curriculum = self.data.curriculum
        return curriculum.by if curriculum is not None and curriculum.by not in ("length", "rarity") else None

    @property
    def stop_on_bad(self) -> bool:
        """Whether a bad record is an error. By default media skip it, since a few files are often truncated."""
        if self.data.bad_records is not None:
            return self.data.bad_records == "stop"
        return not all(input.source_files.is_media for input in self.inputs)


def _content_key(input: Input) -> tuple[str, str | tuple[str, ...] | None, str | None]:
    """Return the key of an input's content and the fields that are read."""
    source = input.source_files.source
    return input.source_files.fingerprint, source.field, source.label


def _selection_key(input: Input) -> tuple[Any, ...]:
    """Return the key of options that few inputs set; empty if none is set, so that keys from before these options stay valid."""
    labels, number = input.source_files.source.labels, input.source_index
    if labels is None and number is None:
        return ()
    return (labels, number, "own share") if number is not None and input.is_split else (labels, number)


@dataclass(frozen=True)
class PlannedTexts:
    """The planned jobs, for encoders that read the texts first, to train a tokenizer."""

    plan: PreparationPlan
    jobs: tuple[tuple[Item, ...], ...]
    decisions: Decisions | None


def prepare(
    plan: PreparationPlan, *, cache: Path, progress: ProgressCallback = lambda stage, done, total: None
) -> PreparedData:
    """Return the prepared data of a plan, built unless it is cached. Several processes may call this at once."""
    for input in plan.inputs:
        input.source_files.precompute_fingerprint(progress)
    folder = get_or_build(cache, plan.key, lambda folder: _build_tables(plan, folder, progress))
    return PreparedData(folder, plan.key, _list_unread_splits(plan.inputs), plan.held_out_hashes)


def open_prepared(folder: Path, *, task: str) -> PreparedData:
    """Open a folder that `bottega prepare --out` wrote, here or elsewhere."""
    try:
        meta = json.loads((folder / META_FILE).read_bytes())
        prepared_task, version, key = meta["task"], meta["format"], meta["key"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{folder} is not prepared data: {META_FILE} cannot be read; prepare the data again") from error
    if (prepared_task, version) != (task, FORMAT_VERSION):
        raise DataError(
            f"{folder} was prepared for {prepared_task} (format {version}), not for {task} (format {FORMAT_VERSION}); "
            "prepare the data again"
        )
    problem = find_damage(folder) or next(
        (f"{name!r} is not a table" for name in meta["tables"] if not _IS_TABLE_NAME(name)), None
    )
    if problem is not None:
        raise DataError(f"{folder} is damaged: {problem}; copy or prepare it again")
    contents = meta.get("contents")
    return PreparedData(folder, key, held_out_hashes=contents if isinstance(contents, dict) else {})


def is_prepared(folder: Path) -> bool:
    """Return whether `bottega prepare --out` wrote a folder; other data may hold a meta.json of its own."""
    try:
        return {"format", "task", "key", "tables"} <= json.loads((folder / META_FILE).read_bytes()).keys()
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def open_if_prepared(data: Data, *, task: str) -> PreparedData | None:
    """Return the recipe's training data if that is a prepared folder, or None."""
    path = Path(data.train.path).expanduser() if data.train.path is not None else None
    if data.train.kind == "shards" and path is None:
        raise UsageError("data.train.kind=shards needs data.train.path, a folder that `bottega prepare --out` wrote")
    if path is not None and (data.train.kind == "shards" or (data.train.kind == "auto" and is_prepared(path))):
        for key in ("replay", "split", "clean", "filter", "deduplicate"):
            if getattr(data, key, None) is not None:
                raise UsageError(f"data.{key} cannot be applied to {path}, which contains prepared shards; remove it")
        prepared = open_prepared(path, task=task)
        for name, section in (("validation", data.validation), ("test", data.test)):
            if section is not None and section.path is not None:
                raise UsageError(
                    f"data.{name}.path: {path} contains prepared shards with splits of their own; remove it"
                )
            if section is not None and name == "test" and name not in prepared.tables:
                raise UsageError(f"data.{name}: {path} has no such split; prepare it again with one, or remove it")
        return prepared
    return None


def _build_tables(plan: PreparationPlan, folder: Path, progress: ProgressCallback) -> None:
    """Build the tables; temporary folders are removed last, so that a kill at any moment costs little."""
    if not (folder / META_FILE).is_file():
        _write_tables(plan, folder, progress)
    for name in WORK_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)


def _write_tables(plan: PreparationPlan, folder: Path, progress: ProgressCallback) -> None:
    # The held-out end of a single text is cut off by bytes, which needs no scan.
    items = list_items(plan.inputs, plan.split_fractions, cut_single_text=plan.data.split is None)
    jobs = group_into_jobs(items, plan.inputs)
    sizes = tuple(sum(item.bytes for item in job) for job in jobs)
    decisions = _scan_and_decide(plan, jobs, sizes, folder, progress)
    encoder = plan.build_encoder(PlannedTexts(plan, jobs, decisions), folder, progress)
    if plan.score_field is not None:
        encoder = ScoredEncoder(encoder, plan.score_field)
    encode_jobs = EncodeJobs(
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
    counts = encode_tables(encode_jobs, folder, max_bad=plan.data.max_bad, progress=progress)
    for name, count in (decisions.dropped if decisions else {}).items():
        counts["dropped"][name] = count
    classes = None
    if "label" in encoder.columns:
        _check_labels(plan, folder)
        classes = _collect_classes(plan, folder, counts["tables"])
    meta = {
        "format": FORMAT_VERSION,
        "task": plan.task,
        "key": plan.key,
        "contents": plan.held_out_hashes,
        **redact_values(counts),
        "classes": classes,
        **redact_values(dict(plan.metadata)),
        **encoder.metadata,
    }
    _check_unchanged(plan)
    for table in counts["tables"]:
        flush_all(folder / table)
    write_atomic(folder / META_FILE, json.dumps(meta, indent=1))


def _list_unread_splits(inputs: tuple[Input, ...]) -> tuple[str, ...]:
    split_names = {input.source_files.split_name for input in inputs}
    beside_train = {
        split for input in inputs if input.table.startswith("train") for split in input.source_files.other_splits
    }
    return tuple(sorted(beside_train - split_names))


def _check_unchanged(plan: PreparationPlan) -> None:
    """Raise DataError if an input changed since its key was computed; hashes are cached, so this only checks times."""
    for input in plan.inputs:
        current_files = replace(input.source_files)
        if current_files.fingerprint != input.source_files.fingerprint:
            raise DataError(f"{input.source_files.root} changed while it was read; run again when it no longer changes")


def _collect_classes(plan: PreparationPlan, folder: Path, tables: Iterable[str]) -> list[str]:
    """Return the classes of all tables; an unknown label is an error here rather than in training."""
    first_keys: dict[str, str] = {}
    for name in tables:
        table = Table(folder / name)
        for number, label in enumerate(_iterate_column(table, "label")):
            if label not in first_keys:
                first_keys[label] = table.row("key", number)
    classes = find_classes_if_labelled(first_keys, num_classes=plan.num_classes, required=plan.needs_classes)
    if len(classes):
        classes.ids(list(first_keys), keys=list(first_keys.values()))
    return list(classes.names)


def _check_labels(plan: PreparationPlan, folder: Path) -> None:
    """Raise DataError if `labels` names a class that no record has."""
    for input in plan.inputs:
        labels = input.source_files.source.labels
        if labels is None or not input.table.startswith("train"):
            continue
        present = set(read_text_column(Table(folder / input.table), "label"))
        absent = [label for label in labels if label not in present]
        if absent:
            raise DataError(
                f"{input.source_files.root}: no record has the class {absent[0]!r} of data.train.labels (those with "
                f"records: {', '.join(sorted(present))}); remove it"
            )


def _iterate_column(table: Table, name: str) -> Iterator[str]:
    return (table.row(name, number) for number in range(len(table)))


def _scan_and_decide(
    plan: PreparationPlan,
    jobs: tuple[tuple[Item, ...], ...],
    sizes: tuple[int, ...],
    folder: Path,
    progress: ProgressCallback,
) -> Decisions | None:
    needs_split = any(item.table is None and plan.inputs[item.input].is_split for job in jobs for item in job)
    if not needs_split and plan.deduplicate is None:
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
        content_encoder=plan.content_encoder,
    )
    return decide_tables(scan, plan.split_fractions, plan.tables, max_bad=plan.data.max_bad, progress=progress)
