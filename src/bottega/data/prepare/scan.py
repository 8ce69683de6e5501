"""A first pass over all records, needed if the table of one depends on others: fractions, classes, groups, duplicates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bottega.config.data import Deduplication, Splitting
from bottega.core.errors import DataError
from bottega.data.prepare.inputs import Input, Item, Shares
from bottega.data.prepare.jobs import Jobs, ProgressCallback, run_jobs
from bottega.data.prepare.rules import Rules, read_records
from bottega.data.prepare.tally import Tally
from bottega.data.records.fields import list_fields, read_label
from bottega.data.records.record import BadRecord, Record, Unreadable
from bottega.data.tables.splits import SplitTable, assign_splits, hash_key
from bottega.data.text.duplicates import (
    NUM_PERMUTATIONS,
    find_exact_unique,
    find_near_unique,
    hash_content,
    minhash_signature,
)

SPLITS = ("train", "validation", "test")
NO_FIELD = "no field to split by"


class ScannedRecord(NamedTuple):
    """The properties of a record that decide its table; names are 64-bit hashes. Field names are those of files on disk."""

    keys: int
    sizes: int = 0
    files: int = 0
    labels: int = 0
    groups: int = 0
    contents: int = 0
    kept: bool = False
    placed: bool = False
    signatures: np.ndarray | None = None
    """Only if near duplicates are removed."""


TYPES: dict[str, Any] = {
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
    duplicates: Deduplication | None
    stop_on_bad: bool
    """Whether a bad record is an error."""
    by_length: bool = False
    """Whether fractions are of the text length rather than of the number of records."""
    stage: str = "scan"

    def num_pieces(self, number: int) -> int:
        return len(self.jobs[number])

    def run_job(self, number: int, out: Path) -> dict[str, Any]:
        tally = Tally()
        rows = list(self._rows(number, tally))
        for name in ScannedRecord._fields:
            if name != "signatures" or self.finds_near_duplicates:
                np.save(out / f"{name}.npy", np.array([getattr(row, name) for row in rows], TYPES[name]))
        return {**vars(tally), "records": len(rows)}

    @property
    def finds_near_duplicates(self) -> bool:
        return self.duplicates is not None and self.duplicates.method == "near"

    def _rows(self, number: int, tally: Tally) -> Iterator[ScannedRecord]:
        empty = minhash_signature("") if self.finds_near_duplicates else None
        for item in self.jobs[number]:
            file = hash_key(item.piece.name)
            for record in read_records(self.inputs, item, self.rules):
                scanned = self._scan(record, item, tally) if isinstance(record, Record) else None
                if isinstance(record, BadRecord):
                    tally.count_bad(record, stop=self.stop_on_bad)
                yield (scanned or ScannedRecord(hash_key(record.key), signatures=empty))._replace(files=file)

    def _scan(self, record: Record, item: Item, tally: Tally) -> ScannedRecord | None:
        """Return the properties of a record, or None if it lacks the field to split by."""
        is_split = self.inputs[item.input].is_split
        group = 0
        if is_split and self.split.by in ("hash", "group") and self.split.field is not None:
            if self.split.field not in record.fields:
                reason = f"has no field {self.split.field!r} to split by; it has {list_fields(record.fields)}"
                tally.count_bad(BadRecord(record.key, record.where, reason), stop=self.stop_on_bad)
                # The encoder does not get this record, so it is counted here.
                tally.dropped[NO_FIELD] = tally.dropped.get(NO_FIELD, 0) + 1
                return None
            group = hash_key(str(record.fields[self.split.field]))
        text = str(record.fields.get("text", "")) if self.rules.is_text else ""
        return ScannedRecord(
            keys=hash_key(record.key),
            sizes=len(text) if self.by_length else 1,
            labels=hash_key(self._label(record)) if is_split and self.split.by == "stratified" else 0,
            groups=group,
            contents=hash_content(text) if self.duplicates is not None else 0,
            kept=True,
            placed=item.table is not None,
            signatures=minhash_signature(text) if self.finds_near_duplicates else None,
        )

    def _label(self, record: Record) -> str:
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
    tally, counts = Tally(), []
    for summary in run_jobs(scan, progress):
        tally.add(summary)
        counts.append(summary["records"])
    # Checked before splitting: too few good records would fail there with a misleading message.
    tally.check(max_bad)
    load = partial(_load, scan, len(counts))
    accepted = load("kept")
    keep = accepted.copy()
    if scan.duplicates is not None:
        keep[accepted] = _find_unique(scan, load, accepted, counts)
    inputs = np.repeat([job[0].input for job in scan.jobs], counts).astype(np.int64)
    table_numbers: np.ndarray = np.array([tables.index(input.table) for input in scan.inputs], np.int8)[inputs]
    splitting = np.array([input.is_split for input in scan.inputs])[inputs] & keep & ~load("placed")
    for rows, source_root in _split_groups(scan, splitting, inputs):
        splits = _assign(scan, load, rows, fractions, source_root=source_root)
        for split, name in enumerate(SPLITS[1:], start=1):
            if name in tables:
                table_numbers[np.flatnonzero(rows)[splits == split]] = tables.index(name)
    table_numbers[~keep] = -1
    folder = scan.folder.with_name("decisions")
    folder.mkdir(exist_ok=True)
    for number, decided in enumerate(np.split(table_numbers, np.cumsum(counts)[:-1])):
        np.save(folder / f"{number:06d}.npy", decided)
    num_duplicates = int(accepted.sum() - keep.sum())
    return Decisions(folder, {**tally.dropped, **({"duplicate": num_duplicates} if num_duplicates else {})})


def _split_groups(
    scan: ScanJobs, splitting: np.ndarray, inputs: np.ndarray
) -> Iterator[tuple[np.ndarray, Path | None]]:
    """Yield groups of rows that are split by themselves: all of them, or for a sequence each source, with its path.

    A sequence evaluates each source separately, so each needs held-out rows, however few it has.
    """
    if not splitting.any():
        return
    separate = [number for number, input in enumerate(scan.inputs) if input.is_split and input.source_index is not None]
    if not separate:
        yield splitting, None
    for number in separate:
        rows = splitting & (inputs == number)
        if rows.any():
            yield rows, scan.inputs[number].source_files.root


def _assign(scan: ScanJobs, load: Any, rows: np.ndarray, fractions: Shares, *, source_root: Path | None) -> np.ndarray:
    try:
        return assign_splits(_split_table(scan, load, rows), scan.split, fractions.validation, fractions.test)
    except DataError as error:
        if source_root is None:
            raise
        raise DataError(f"{source_root}, which is split by itself in a sequence: {error}") from None


def _load(scan: ScanJobs, count: int, name: str) -> np.ndarray:
    arrays = [np.load(scan.job_folder(n) / f"{name}.npy", allow_pickle=False) for n in range(count)]
    return np.concatenate(arrays) if arrays else np.empty(0)


def _find_unique(scan: ScanJobs, load: Any, accepted: np.ndarray, counts: list[int]) -> np.ndarray:
    """Return which of the kept records are not duplicates of an earlier one."""
    assert scan.duplicates is not None
    keep = find_exact_unique(load("contents")[accepted])
    if scan.finds_near_duplicates:
        compared = accepted.copy()
        compared[accepted] = keep
        keep[keep] = find_near_unique(_signatures(scan, compared, counts), scan.duplicates.threshold)
    return keep


def _signatures(scan: ScanJobs, rows: np.ndarray, counts: list[int]) -> np.ndarray:
    """Return the signatures of `rows`, copied once: 512 bytes per record are 5 GB for ten million."""
    signatures = np.empty((np.count_nonzero(rows), NUM_PERMUTATIONS), np.uint32)
    filled = start = 0
    for number, count in enumerate(counts):
        selected = np.flatnonzero(rows[start : start + count])
        start += count
        if len(selected):
            stored = np.load(scan.job_folder(number) / "signatures.npy", mmap_mode="r", allow_pickle=False)
            np.take(stored, selected, axis=0, out=signatures[filled : filled + len(selected)], mode="clip")
            filled += len(selected)
    return signatures


def _split_table(scan: ScanJobs, load: Any, rows: np.ndarray) -> SplitTable:
    # A hash split by a field takes the field's value in place of the record key.
    keys = load("groups") if scan.split.by == "hash" and scan.split.field is not None else load("keys")
    return SplitTable(
        keys=keys[rows],
        sizes=load("sizes")[rows],
        files=load("files")[rows],
        labels=load("labels")[rows] if scan.split.by == "stratified" else None,
        groups=load("groups")[rows] if scan.split.by == "group" else None,
    )
