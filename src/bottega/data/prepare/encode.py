"""Every record into its table: read, ruled, encoded and written in parts, then merged."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bottega.core.errors import DataError
from bottega.data.encoder import Encoder
from bottega.data.prepare.inputs import Input, Item
from bottega.data.prepare.jobs import Jobs, Progress, run
from bottega.data.prepare.rules import Dropped, Rules, records
from bottega.data.prepare.scan import Decisions
from bottega.data.record import Bad, Record
from bottega.data.shards import ShardWriter, merge

# Bad records that are named; beyond that they are only counted.
NAMED = 100
DEFAULT_MAX_BAD = 0.001


@dataclass(frozen=True)
class Encode(Jobs):
    inputs: tuple[Input, ...]
    jobs: tuple[tuple[Item, ...], ...]
    folder: Path
    sizes: tuple[int, ...]
    rules: Rules
    encoder: Encoder
    tables: tuple[str, ...]
    decisions: Decisions | None
    stop: bool
    """Whether a bad record ends it all."""
    stage: str = "encode"

    def work(self, number: int, out: Path) -> dict[str, Any]:
        tally = Tally()
        counts: dict[str, Counter[str]] = {}
        with ExitStack() as stack:
            writers: dict[str, ShardWriter] = {}
            for table, row in self.encoder.encode(self._chosen(number, tally)):
                if isinstance(row, Bad):
                    self._bad(row, tally)
                    continue
                if table not in writers:
                    writers[table] = stack.enter_context(ShardWriter(out / table, self.encoder.columns))
                    counts[table] = Counter()
                writers[table].add(row)
                counts[table].update({name: row[name] for name in self.encoder.counted})
        return {"tables": counts, **vars(tally)}

    def _chosen(self, number: int, tally: Tally) -> Iterator[tuple[str, Record]]:
        """The records that stay, each with its table."""
        decided = self.decisions.of(number) if self.decisions is not None else None
        position = -1
        for item in self.jobs[number]:
            for record in records(self.inputs, item, self.rules):
                position += 1
                tally.records += 1
                if isinstance(record, Bad):
                    self._bad(record, tally)
                elif isinstance(record, Dropped):
                    tally.dropped[record.reason] = tally.dropped.get(record.reason, 0) + 1
                elif decided is None or item.table is not None:
                    yield item.table or self.inputs[item.input].table, record
                elif decided[position] >= 0:
                    yield self.tables[decided[position]], record

    def _bad(self, bad: Bad, tally: Tally) -> None:
        if self.stop:
            raise DataError(str(bad))
        tally.bad += 1
        if len(tally.named) < NAMED:
            tally.named.append(str(bad))


@dataclass
class Tally:
    """What became of the records."""

    records: int = 0
    bad: int = 0
    named: list[str] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)

    def add(self, other: dict[str, Any]) -> None:
        self.records += other["records"]
        self.bad += other["bad"]
        self.named += other["named"][: NAMED - len(self.named)]
        self.dropped = dict(Counter(self.dropped) + Counter(other["dropped"]))


def encode(jobs: Encode, folder: Path, *, max_bad: float | None, progress: Progress) -> dict[str, Any]:
    """All jobs, and their parts as one table each in `folder`. What is known of them afterwards, as plain values."""
    tally = Tally()
    counts: dict[str, Counter[str]] = {}
    for summary in run(jobs, progress):
        tally.add(summary)
        for table, counted in summary["tables"].items():
            counts.setdefault(table, Counter()).update(counted)
    _check(tally, DEFAULT_MAX_BAD if max_bad is None else max_bad)
    parts = [jobs.part(number) for number in range(len(jobs.jobs))]
    tables = {}
    for table in jobs.tables:
        found = [part / table for part in parts if (part / table).is_dir()]
        if not found and not table.startswith("train"):
            continue
        rows = merge(found, folder / table, jobs.encoder.columns)
        tables[table] = {"rows": rows, **counts.get(table, {})}
    shutil.rmtree(jobs.folder)
    if not any(tables[table]["rows"] for table in tables if table.startswith("train")):
        raise DataError(_nothing(jobs.inputs, tally))
    return {"tables": tables, **vars(tally)}


def _check(tally: Tally, max_bad: float) -> None:
    if tally.bad > max_bad * tally.records:
        others = f" (and {tally.bad - 1:,} more)" if tally.bad > 1 else ""
        raise DataError(
            f"{tally.named[0]}{others}; {tally.bad:,} of {tally.records:,} records are bad, more than data.max_bad="
            f"{max_bad:g} allows"
        )


def _nothing(inputs: Iterable[Input], tally: Tally) -> str:
    train = next(input.found for input in inputs if input.table.startswith("train"))
    where = train.files[0] if len(train.files) == 1 else f"the {len(train.files)} files of {train.root}"
    if not tally.records or set(tally.dropped) <= {"empty"}:
        return f"{where} {'is' if len(train.files) == 1 else 'are all'} empty; give a file with data in it"
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(tally.dropped.items()))
    return f"nothing is left of the {tally.records:,} records of {train.root}: {reasons}; loosen data.filter"
