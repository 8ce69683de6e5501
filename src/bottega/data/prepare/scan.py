"""A first look at every record, where what becomes of one depends on the others: shares, classes, groups, duplicates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bottega.core.errors import DataError
from bottega.data.prepare.inputs import Input, Item, Shares
from bottega.data.prepare.jobs import Jobs, Progress, run
from bottega.data.prepare.rules import Rules, label_of, records
from bottega.data.prepare.tally import Tally
from bottega.data.record import Bad, Record
from bottega.data.splits import SplitTable, assign
from bottega.data.text.duplicates import content_key, keep_exact, keep_near, signature
from bottega.schema.data import Duplicates, Splitting

PARTS = ("train", "validation", "test")


@dataclass(frozen=True)
class Scan(Jobs):
    """What a decision needs to know of each record, as arrays."""

    inputs: tuple[Input, ...]
    jobs: tuple[tuple[Item, ...], ...]
    folder: Path
    sizes: tuple[int, ...]
    rules: Rules
    split: Splitting
    label_field: str | None
    duplicates: Duplicates | None
    stop: bool
    """Whether a bad record ends it all."""
    stage: str = "scan"

    def work(self, number: int, out: Path) -> dict[str, Any]:
        tally = Tally()
        rows = list(self._rows(number, tally))
        columns = zip(*rows, strict=True) if rows else ([],) * 9
        keys, sizes, files, labels, groups, contents, signatures, kept, placed = columns
        np.save(out / "keys.npy", np.array(keys, np.uint64))
        np.save(out / "sizes.npy", np.array(sizes, np.int64))
        np.save(out / "files.npy", np.array(files, np.uint64))
        np.save(out / "labels.npy", np.array(labels, np.uint64))
        np.save(out / "groups.npy", np.array(groups, np.uint64))
        np.save(out / "contents.npy", np.array(contents, np.uint64))
        np.save(out / "kept.npy", np.array(kept, np.bool_))
        np.save(out / "placed.npy", np.array(placed, np.bool_))
        if self.duplicates is not None and self.duplicates.method == "near":
            np.save(out / "signatures.npy", np.array(signatures, np.uint32).reshape(len(rows), -1))
        return {**vars(tally), "records": len(rows)}

    def _rows(self, number: int, tally: Tally) -> Iterator[tuple[Any, ...]]:
        near = self.duplicates is not None and self.duplicates.method == "near"
        empty = signature("") if near else None
        for item in self.jobs[number]:
            file = _hash(item.piece.name)
            for record in records(self.inputs, item, self.rules):
                if not isinstance(record, Record):
                    if isinstance(record, Bad):
                        tally.note(record, stop=self.stop)
                    yield _hash(record.key), 0, file, 0, 0, 0, empty, False, False
                    continue
                text = str(record.fields.get("text", ""))
                content = content_key(text) if self.duplicates is not None else 0
                label = self._label(record) if self.split.by == "stratified" else None
                group = _hash(str(self._group(record))) if self.split.field is not None else 0
                size = len(text) if self.rules.is_text else 1
                similar = signature(text) if near else None
                placed = item.table is not None
                yield _hash(record.key), size, file, _hash(str(label)), group, content, similar, True, placed

    def _label(self, record: Record) -> Any:
        try:
            return label_of(record, self.label_field)
        except DataError:
            if self.stop:
                raise
            return None  # the encoder will find it bad, and count and name it

    def _group(self, record: Record) -> Any:
        if self.split.field not in record.fields:
            raise DataError(
                f"{record.where}: no field {self.split.field!r} to split by; it has "
                f"{', '.join(map(repr, record.fields))}"
            )
        return record.fields[self.split.field]


@dataclass(frozen=True)
class Decisions:
    """For each record of each job: the number of its table, -1 for none."""

    folder: Path
    dropped: dict[str, int]

    def of(self, number: int) -> np.ndarray:
        return np.load(self.folder / f"{number:06d}.npy", mmap_mode="r", allow_pickle=False)


def decide(
    scan: Scan, shares: Shares, tables: tuple[str, ...], *, max_bad: float | None, progress: Progress
) -> Decisions:
    """The scan, and what follows from it."""
    tally, counts = Tally(), []
    for summary in run(scan, progress):
        tally.add(summary)
        counts.append(summary["records"])
    # Here already: the few that are left may not be enough to split, which would be told in place of the reason.
    tally.check(max_bad)
    load = partial(_load, scan, len(counts))
    kept = load("kept")
    keep = kept.copy()
    if scan.duplicates is not None:
        keep[kept] = _unrepeated(scan.duplicates, load, kept)
    inputs = np.repeat([job[0].input for job in scan.jobs], counts).astype(np.int64)
    chosen: np.ndarray = np.array([tables.index(input.table) for input in scan.inputs], np.int8)[inputs]
    splitting = np.array([input.is_split for input in scan.inputs])[inputs] & keep & ~load("placed")
    if splitting.any():
        parts = assign(_table(scan, load, splitting), scan.split, shares.validation, shares.test)
        for part, name in enumerate(PARTS[1:], start=1):
            if name in tables:
                chosen[np.flatnonzero(splitting)[parts == part]] = tables.index(name)
    chosen[~keep] = -1
    folder = scan.folder.with_name("decisions")
    folder.mkdir(exist_ok=True)
    for number, decided in enumerate(np.split(chosen, np.cumsum(counts)[:-1])):
        np.save(folder / f"{number:06d}.npy", decided)
    repeated = int(kept.sum() - keep.sum())
    return Decisions(folder, {"duplicate": repeated} if repeated else {})


def _load(scan: Scan, count: int, name: str) -> np.ndarray:
    parts = [np.load(scan.part(n) / f"{name}.npy", allow_pickle=False) for n in range(count)]
    return np.concatenate(parts) if parts else np.empty(0)


def _unrepeated(duplicates: Duplicates, load: Any, kept: np.ndarray) -> np.ndarray:
    keep = keep_exact(load("contents")[kept])
    if duplicates.method == "near":
        keep[keep] = keep_near(load("signatures")[kept][keep], duplicates.threshold)
    return keep


def _table(scan: Scan, load: Any, rows: np.ndarray) -> SplitTable:
    # Hashing by a field is hashing by the row's name where the field is the name.
    keys = load("groups") if scan.split.by == "hash" and scan.split.field is not None else load("keys")
    return SplitTable(
        keys=keys[rows],
        sizes=load("sizes")[rows],
        files=load("files")[rows],
        labels=load("labels")[rows] if scan.split.by == "stratified" else None,
        groups=load("groups")[rows] if scan.split.by == "group" else None,
    )


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
