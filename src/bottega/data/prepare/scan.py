"""A first pass over all records, needed if fractions, classes, groups or duplicates decide the table of a record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bottega.config.data import Deduplication, ExactDeduplication, Splitting
from bottega.core.errors import DataError
from bottega.data.prepare.encoder import Encoder
from bottega.data.prepare.inputs import Input, Item, Shares
from bottega.data.prepare.jobs import Jobs, ProgressCallback, run_jobs
from bottega.data.prepare.rules import Rules, read_records
from bottega.data.prepare.tally import Tally
from bottega.data.records.fields import list_fields, read_label
from bottega.data.records.record import BadRecord, Record, Unreadable
from bottega.data.tables.content import hash_rows
from bottega.data.tables.splits import SplitTable, assign_splits, hash_key
from bottega.data.text.duplicates import (
    NUM_PERMUTATIONS,
    find_exact_unique,
    find_near_unique,
    hash_content,
    minhash_signature,
)

SPLITS = ("train", "validation", "test")
NO_SPLIT_FIELD = "no field to split by"


class ScannedRecord(NamedTuple):
    """The properties of a record that decide its table. Field names are those of files on disk.

    `keys`, `files`, `labels`, `groups` and `contents` are 64-bit hashes; `sizes` is a number of characters, or 1.
    """

    keys: int
    sizes: int = 0
    files: int = 0
    labels: int = 0
    groups: int = 0
    contents: int = 0
    kept: bool = False
    """Whether the record is neither bad nor dropped by a rule."""
    placed: bool = False
    """Whether its table is decided already, as for the held-out end of a single text."""
    signatures: np.ndarray | None = None
    """Only if near duplicates are removed."""


DTYPES: dict[str, Any] = {
    "keys": np.uint64,
    "sizes": np.int64,
    "files": np.uint64,
    "labels": np.uint64,
    "groups": np.uint64,
    "contents": np.uint64,
    "kept": np.bool_,
    "placed": np.bool_,
    "signatures": np.uint32,
}


@dataclass(frozen=True)
class ScanJobs(Jobs):
    """Jobs that write one array per field of ScannedRecord."""

    inputs: tuple[Input, ...]
    jobs: tuple[tuple[Item, ...], ...]
    folder: Path
    sizes: tuple[int, ...]
    rules: Rules
    split: Splitting
    label_field: str | None
    duplicates: Deduplication | ExactDeduplication | None
    stop_on_bad: bool
    """Whether a bad record is an error."""
    by_length: bool = False
    """Whether fractions are of the text length rather than of the number of records."""
    content_encoder: Encoder | None = None
    """Encoder whose rows are compared to find duplicates; None compares texts."""
    stage: str = "scan"

    def num_pieces(self, number: int) -> int:
        return len(self.jobs[number])

    def run_job(self, number: int, out: Path) -> dict[str, Any]:
        tally = Tally()
        rows = list(self._scan_job(number, tally))
        for name in ScannedRecord._fields:
            if name != "signatures" or self.finds_near_duplicates:
                np.save(out / f"{name}.npy", np.array([getattr(row, name) for row in rows], DTYPES[name]))
        return {**vars(tally), "records": len(rows)}

    @property
    def finds_near_duplicates(self) -> bool:
        return self.duplicates is not None and self.duplicates.method == "near"

    def _scan_job(self, number: int, tally: Tally) -> Iterator[ScannedRecord]:
        empty_signature = minhash_signature("") if self.finds_near_duplicates else None
        for item in self.jobs[number]:
            file = hash_key(item.piece.name)
            for record in read_records(self.inputs, item, self.rules):
                scanned = self._scan_record(record, item, tally) if isinstance(record, Record) else None
                if isinstance(record, BadRecord):
                    tally.count_bad(record, stop=self.stop_on_bad)
                yield (scanned or ScannedRecord(hash_key(record.key), signatures=empty_signature))._replace(files=file)

    def _scan_record(self, record: Record, item: Item, tally: Tally) -> ScannedRecord | None:
        """Return the properties of a record, or None if it lacks the field to split by."""
        is_split = self.inputs[item.input].is_split
        group = 0
        if is_split and self.split.by in ("hash", "group") and self.split.field is not None:
            if self.split.field not in record.fields:
                reason = f"has no field {self.split.field!r} to split by; it has {list_fields(record.fields)}"
                tally.count_bad(BadRecord(record.key, record.where, reason), stop=self.stop_on_bad)
                # The encoder does not get this record, so it is counted as dropped here.
                tally.dropped[NO_SPLIT_FIELD] = tally.dropped.get(NO_SPLIT_FIELD, 0) + 1
                return None
            group = hash_key(str(record.fields[self.split.field]))
        text = str(record.fields.get("text", "")) if self.rules.is_text else ""
        return ScannedRecord(
            keys=hash_key(record.key),
            sizes=len(text) if self.by_length else 1,
            labels=hash_key(self._read_label(record)) if is_split and self.split.by == "stratified" else 0,
            groups=group,
            contents=self._hash_record(record, text) if self.duplicates is not None else 0,
            kept=True,
            placed=item.table is not None,
            signatures=minhash_signature(text) if self.finds_near_duplicates else None,
        )

    def _hash_record(self, record: Record, text: str) -> int:
        """Return the hash of a record's content; a record that cannot be decoded equals no other, and the encoder reports it."""
        if self.content_encoder is None:
            return hash_content(text)
        try:
            return hash_rows(self.content_encoder.rows(record))
        except Unreadable:
            return hash_key(record.key)

    def _read_label(self, record: Record) -> str:
        """Return the label as the encoder stores it; empty if it cannot be read, which the encoder will report."""
        try:
            return read_label(record, self.label_field)
        except Unreadable as error:
            if self.stop_on_bad:
                raise DataError(f"{record.where}: {error}") from error
            return ""


@dataclass(frozen=True)
class Decisions:
    """The number of the table of each record of each job; -1 if it is dropped."""

    folder: Path
    dropped: dict[str, int]

    def for_job(self, number: int) -> np.ndarray:
        """Return the table numbers of the records of a job, memory-mapped."""
        return np.load(self.folder / f"{number:06d}.npy", mmap_mode="r", allow_pickle=False)


def decide_tables(
    scan: ScanJobs, fractions: Shares, tables: tuple[str, ...], *, max_bad: float | None, progress: ProgressCallback
) -> Decisions:
    """Scan all records and decide the table of each."""
    tally, records_per_job = Tally(), []
    for summary in run_jobs(scan, progress):
        tally.add(summary)
        records_per_job.append(summary["records"])
    # Checked before splitting: too few good records would fail there with a misleading message.
    tally.check(max_bad)
    load = partial(_load_field, scan, len(records_per_job))
    is_accepted = load("kept")
    is_kept = is_accepted.copy()
    if scan.duplicates is not None:
        is_kept[is_accepted] = _find_unique(scan, load, is_accepted, records_per_job)
    inputs = np.repeat([job[0].input for job in scan.jobs], records_per_job).astype(np.int64)
    table_numbers: np.ndarray = np.array([tables.index(input.table) for input in scan.inputs], np.int8)[inputs]
    is_split = np.array([input.is_split for input in scan.inputs])[inputs] & is_kept & ~load("placed")
    for rows, source_root in _iterate_split_groups(scan, is_split, inputs):
        splits = _assign_group(scan, load, rows, fractions, source_root=source_root)
        for split, name in enumerate(SPLITS[1:], start=1):
            if name in tables:
                table_numbers[np.flatnonzero(rows)[splits == split]] = tables.index(name)
    table_numbers[~is_kept] = -1
    folder = scan.folder.with_name("decisions")
    folder.mkdir(exist_ok=True)
    for number, job_tables in enumerate(np.split(table_numbers, np.cumsum(records_per_job)[:-1])):
        np.save(folder / f"{number:06d}.npy", job_tables)
    num_duplicates = int(is_accepted.sum() - is_kept.sum())
    return Decisions(folder, {**tally.dropped, **({"duplicate": num_duplicates} if num_duplicates else {})})


def _iterate_split_groups(
    scan: ScanJobs, is_split: np.ndarray, inputs: np.ndarray
) -> Iterator[tuple[np.ndarray, Path | None]]:
    """Yield groups of rows that are split by themselves: all of them, or for a sequence each source, with its path.

    A sequence evaluates each source separately, so each needs held-out rows, however few it has.
    """
    if not is_split.any():
        return
    sequence_inputs = [
        number for number, input in enumerate(scan.inputs) if input.is_split and input.source_index is not None
    ]
    if not sequence_inputs:
        yield is_split, None
    for number in sequence_inputs:
        rows = is_split & (inputs == number)
        if rows.any():
            yield rows, scan.inputs[number].source_files.root


def _assign_group(
    scan: ScanJobs, load: Any, rows: np.ndarray, fractions: Shares, *, source_root: Path | None
) -> np.ndarray:
    """Return the split of each of `rows` as an index in SPLITS; `source_root` is named in errors."""
    try:
        return assign_splits(_build_split_table(scan, load, rows), scan.split, fractions.validation, fractions.test)
    except DataError as error:
        if source_root is None:
            raise
        raise DataError(f"{source_root}, which is split by itself in a sequence: {error}") from None


def _load_field(scan: ScanJobs, num_jobs: int, name: str) -> np.ndarray:
    """Return one field of all scanned records (records,)."""
    arrays = [np.load(scan.job_folder(n) / f"{name}.npy", allow_pickle=False) for n in range(num_jobs)]
    return np.concatenate(arrays) if arrays else np.empty(0)


def _find_unique(scan: ScanJobs, load: Any, is_accepted: np.ndarray, records_per_job: list[int]) -> np.ndarray:
    """Return which of the accepted records are not duplicates of an earlier one."""
    is_unique = find_exact_unique(load("contents")[is_accepted])
    if isinstance(scan.duplicates, Deduplication) and scan.finds_near_duplicates:
        is_compared = is_accepted.copy()
        is_compared[is_accepted] = is_unique
        is_unique[is_unique] = find_near_unique(
            _load_signatures(scan, is_compared, records_per_job), scan.duplicates.threshold
        )
    return is_unique


def _load_signatures(scan: ScanJobs, is_compared: np.ndarray, records_per_job: list[int]) -> np.ndarray:
    """Return the signatures of the records in `is_compared`, copied once: 512 bytes per record are 5 GB for ten million."""
    signatures = np.empty((np.count_nonzero(is_compared), NUM_PERMUTATIONS), np.uint32)
    num_filled = start = 0
    for number, count in enumerate(records_per_job):
        selected = np.flatnonzero(is_compared[start : start + count])
        start += count
        if len(selected):
            stored = np.load(scan.job_folder(number) / "signatures.npy", mmap_mode="r", allow_pickle=False)
            np.take(stored, selected, axis=0, out=signatures[num_filled : num_filled + len(selected)], mode="clip")
            num_filled += len(selected)
    return signatures


def _build_split_table(scan: ScanJobs, load: Any, rows: np.ndarray) -> SplitTable:
    # A hash split by a field takes the field's value in place of the record key.
    keys = load("groups") if scan.split.by == "hash" and scan.split.field is not None else load("keys")
    return SplitTable(
        keys=keys[rows],
        sizes=load("sizes")[rows],
        files=load("files")[rows],
        labels=load("labels")[rows] if scan.split.by == "stratified" else None,
        groups=load("groups")[rows] if scan.split.by == "group" else None,
    )
