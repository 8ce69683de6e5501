"""A first look at every record, where what becomes of one depends on the others: shares, classes, groups, duplicates."""

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
    PERMUTATIONS,
    find_exact_unique,
    find_near_unique,
    hash_content,
    minhash_signature,
)

PARTS = ("train", "validation", "test")
NO_FIELD = "no field to split by"


class ScannedRecord(NamedTuple):
    """What a decision needs to know of one record; hashes of 64 bits stand for names."""

    keys: int
    sizes: int = 0
    files: int = 0
    labels: int = 0
    groups: int = 0
    contents: int = 0
    kept: bool = False
    placed: bool = False
    signatures: np.ndarray | None = None
    """Only where near duplicates are looked for."""


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
    """What is seen of each record, as one array for each field of Seen."""

    inputs: tuple[Input, ...]
    jobs: tuple[tuple[Item, ...], ...]
    folder: Path
    sizes: tuple[int, ...]
    rules: Rules
    split: Splitting
    label_field: str | None
    duplicates: Deduplication | None
    stop_on_bad: bool
    """Whether a bad record ends it all."""
    by_length: bool = False
    """Whether a share is one of the text rather than of the records."""
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
                seen = self._seen(record, item, tally) if isinstance(record, Record) else None
                if isinstance(record, BadRecord):
                    tally.count_bad(record, stop=self.stop_on_bad)
                yield (seen or ScannedRecord(hash_key(record.key), signatures=empty))._replace(files=file)

    def _seen(self, record: Record, item: Item, tally: Tally) -> ScannedRecord | None:
        """None where it cannot be told which side it belongs to."""
        is_split = self.inputs[item.input].is_split
        group = 0
        if is_split and self.split.by in ("hash", "group") and self.split.field is not None:
            if self.split.field not in record.fields:
                reason = f"no field {self.split.field!r} to split by; it has {list_fields(record.fields)}"
                tally.count_bad(BadRecord(record.key, record.where, reason), stop=self.stop_on_bad)
                # The encoder never sees it, so this is the only place where it is counted.
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
        """As the encoder stores it. Where there is none to be found, the encoder will find the record bad and say so."""
        try:
            return read_label(record, self.label_field)
        except Unreadable as error:
            if self.stop_on_bad:
                raise DataError(f"{record.where}: {error}") from error
            return ""


@dataclass(frozen=True)
class Decisions:
    """For each record of each job: the number of its table, -1 for none."""

    folder: Path
    dropped: dict[str, int]

    def for_job(self, number: int) -> np.ndarray:
        return np.load(self.folder / f"{number:06d}.npy", mmap_mode="r", allow_pickle=False)


def decide_tables(
    scan: ScanJobs, shares: Shares, tables: tuple[str, ...], *, max_bad: float | None, progress: ProgressCallback
) -> Decisions:
    """The scan, and what follows from it."""
    tally, counts = Tally(), []
    for summary in run_jobs(scan, progress):
        tally.add(summary)
        counts.append(summary["records"])
    # Here already: the few that are left may not be enough to split, which would be told in place of the reason.
    tally.check(max_bad)
    load = partial(_load, scan, len(counts))
    kept = load("kept")
    keep = kept.copy()
    if scan.duplicates is not None:
        keep[kept] = _unrepeated(scan, load, kept, counts)
    inputs = np.repeat([job[0].input for job in scan.jobs], counts).astype(np.int64)
    chosen: np.ndarray = np.array([tables.index(input.table) for input in scan.inputs], np.int8)[inputs]
    splitting = np.array([input.is_split for input in scan.inputs])[inputs] & keep & ~load("placed")
    for rows, where in _split_together(scan, splitting, inputs):
        parts = _assigned(scan, load, rows, shares, where=where)
        for part, name in enumerate(PARTS[1:], start=1):
            if name in tables:
                chosen[np.flatnonzero(rows)[parts == part]] = tables.index(name)
    chosen[~keep] = -1
    folder = scan.folder.with_name("decisions")
    folder.mkdir(exist_ok=True)
    for number, decided in enumerate(np.split(chosen, np.cumsum(counts)[:-1])):
        np.save(folder / f"{number:06d}.npy", decided)
    repeated = int(kept.sum() - keep.sum())
    return Decisions(folder, {**tally.dropped, **({"duplicate": repeated} if repeated else {})})


def _split_together(
    scan: ScanJobs, splitting: np.ndarray, inputs: np.ndarray
) -> Iterator[tuple[np.ndarray, Path | None]]:
    """Yield the rows of which one share is held back: all of them, or in a sequence those of one source, with its path.

    A sequence measures each source by itself, so each needs a share of its own, however few rows it has.
    """
    if not splitting.any():
        return
    alone = [number for number, input in enumerate(scan.inputs) if input.is_split and input.source is not None]
    if not alone:
        yield splitting, None
    for number in alone:
        rows = splitting & (inputs == number)
        if rows.any():
            yield rows, scan.inputs[number].found.root


def _assigned(scan: ScanJobs, load: Any, rows: np.ndarray, shares: Shares, *, where: Path | None) -> np.ndarray:
    try:
        return assign_splits(_table(scan, load, rows), scan.split, shares.validation, shares.test)
    except DataError as error:
        if where is None:
            raise
        raise DataError(f"{where}, of which a sequence holds back its own share: {error}") from None


def _load(scan: ScanJobs, count: int, name: str) -> np.ndarray:
    parts = [np.load(scan.job_folder(n) / f"{name}.npy", allow_pickle=False) for n in range(count)]
    return np.concatenate(parts) if parts else np.empty(0)


def _unrepeated(scan: ScanJobs, load: Any, kept: np.ndarray, counts: list[int]) -> np.ndarray:
    """Which of the kept records say what no record before them says."""
    assert scan.duplicates is not None
    keep = find_exact_unique(load("contents")[kept])
    if scan.finds_near_duplicates:
        compared = kept.copy()
        compared[kept] = keep
        keep[keep] = find_near_unique(_signatures(scan, compared, counts), scan.duplicates.threshold)
    return keep


def _signatures(scan: ScanJobs, rows: np.ndarray, counts: list[int]) -> np.ndarray:
    """Those of `rows`, in memory once: they are 512 bytes a record, 5 GB for ten million."""
    found = np.empty((np.count_nonzero(rows), PERMUTATIONS), np.uint32)
    filled = begun = 0
    for number, count in enumerate(counts):
        wanted = np.flatnonzero(rows[begun : begun + count])
        begun += count
        if len(wanted):
            part = np.load(scan.job_folder(number) / "signatures.npy", mmap_mode="r", allow_pickle=False)
            np.take(part, wanted, axis=0, out=found[filled : filled + len(wanted)], mode="clip")
            filled += len(wanted)
    return found


def _table(scan: ScanJobs, load: Any, rows: np.ndarray) -> SplitTable:
    # Hashing by a field is hashing by the row's name where the field is the name.
    keys = load("groups") if scan.split.by == "hash" and scan.split.field is not None else load("keys")
    return SplitTable(
        keys=keys[rows],
        sizes=load("sizes")[rows],
        files=load("files")[rows],
        labels=load("labels")[rows] if scan.split.by == "stratified" else None,
        groups=load("groups")[rows] if scan.split.by == "group" else None,
    )
