"""Every record into its table: read, ruled, encoded and written in parts, then merged."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bottega.core.errors import DataError
from bottega.data.prepare.encoder import Encoder
from bottega.data.prepare.inputs import Input, Item
from bottega.data.prepare.jobs import Jobs, ProgressCallback, run_jobs
from bottega.data.prepare.rules import OTHER_CLASS, DroppedRecord, Rules, read_records
from bottega.data.prepare.scan import Decisions
from bottega.data.prepare.tally import Tally
from bottega.data.records.record import BadRecord, Record
from bottega.data.tables.shards import ShardWriter, Table, merge_tables


@dataclass(frozen=True)
class EncodeJobs(Jobs):
    inputs: tuple[Input, ...]
    jobs: tuple[tuple[Item, ...], ...]
    folder: Path
    sizes: tuple[int, ...]
    rules: Rules
    encoder: Encoder
    tables: tuple[str, ...]
    decisions: Decisions | None
    stop_on_bad: bool
    """Whether a bad record ends it all."""
    stage: str = "encode"

    def num_pieces(self, number: int) -> int:
        return len(self.jobs[number])

    def run_job(self, number: int, out: Path) -> dict[str, Any]:
        tally = Tally()
        counts: dict[str, Counter[str]] = {}
        with ExitStack() as stack:
            writers: dict[str, ShardWriter] = {}
            for table, row in self.encoder.encode(self._chosen(number, tally)):
                if isinstance(row, BadRecord):
                    tally.count_bad(row, stop=self.stop_on_bad)
                    continue
                if table not in writers:
                    writers[table] = stack.enter_context(ShardWriter(out / table, self.encoder.columns))
                    counts[table] = Counter()
                writers[table].add(row)
                counts[table].update({name: row[name] for name in self.encoder.summed_entries})
        return {"tables": counts, **vars(tally)}

    def _chosen(self, number: int, tally: Tally) -> Iterator[tuple[str, Record]]:
        """The records that stay, each with its table."""
        decided = self.decisions.for_job(number) if self.decisions is not None else None
        position = -1
        for item in self.jobs[number]:
            for record in read_records(self.inputs, item, self.rules):
                position += 1
                tally.records += 1
                if isinstance(record, BadRecord):
                    tally.count_bad(record, stop=self.stop_on_bad)
                elif isinstance(record, DroppedRecord):
                    tally.dropped[record.reason] = tally.dropped.get(record.reason, 0) + 1
                elif decided is None or item.table is not None:
                    yield item.table or self.inputs[item.input].table, record
                elif decided[position] >= 0:
                    yield self.tables[decided[position]], record


def encode_tables(
    jobs: EncodeJobs, folder: Path, *, max_bad: float | None, progress: ProgressCallback
) -> dict[str, Any]:
    """All jobs, and their parts as one table each in `folder`. What is known of them afterwards, as plain values."""
    tally = Tally()
    counts: dict[str, Counter[str]] = {}
    by_input: defaultdict[int, Tally] = defaultdict(Tally)
    for number, summary in enumerate(run_jobs(jobs, progress)):
        tally.add(summary)
        by_input[jobs.jobs[number][0].input].add(summary)
        for table, counted in summary["tables"].items():
            counts.setdefault(table, Counter()).update(counted)
    tally.check(max_bad)
    parts = [jobs.job_folder(number) for number in range(len(jobs.jobs))]
    tables = {}
    for table in jobs.tables:
        found = [part / table for part in parts if (part / table).is_dir()]
        if not found:
            # A missing validation would only be missed when the run is over.
            raise DataError(_nothing(table, jobs.inputs, by_input))
        rows = merge_tables(found, folder / table, jobs.encoder.columns)
        tables[table] = {"rows": rows, **counts.get(table, {})}
    return {"tables": tables, **vars(tally), **_by_source(jobs, parts)}


def _by_source(jobs: EncodeJobs, parts: list[Path]) -> dict[str, dict[str, list[int]]]:
    """How many rows of what is held out are of each source of a sequence; they stand one source after the other."""
    numbers = [jobs.inputs[job[0].input].source for job in jobs.jobs]
    found: dict[str, list[int]] = {}
    for table in ("validation", "test"):
        rows = [
            (number, len(Table(part / table)))
            for number, part in zip(numbers, parts, strict=True)
            if (part / table).is_dir()
        ]
        sources = [number for number, _ in rows if number is not None]
        if rows and len(sources) == len(rows):
            counts = [0] * (1 + max(number for number in numbers if number is not None))
            for number, count in zip(sources, (count for _, count in rows), strict=True):
                counts[number] += count
            found[table] = counts
    return {"by_source": found} if found else {}


def _nothing(table: str, inputs: tuple[Input, ...], tallies: Mapping[int, Tally]) -> str:
    """Why a table is empty."""
    number = next((n for n, input in enumerate(inputs) if input.table == table), None)
    if number is None:  # a share of train
        return f"data.{table} is empty: none of the records came to it; raise its split, or add data"
    found, tally = inputs[number].found, tallies[number]
    if tally.bad and tally.bad == tally.records:
        return f"all {tally.bad:,} records of {found.root} are bad; the first: {tally.named[0]}"
    if not tally.records:
        where = found.files[0] if len(found.files) == 1 else f"the {len(found.files)} files of {found.root}"
        return f"{where} {'is' if len(found.files) == 1 else 'are all'} empty; give a file with data in it"
    rest = tally.records - tally.bad - sum(tally.dropped.values())
    counts = {**tally.dropped, "bad": tally.bad, "duplicate": rest}
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()) if count)
    remedy = "loosen data.filter" if tally.dropped.keys() - {"empty", OTHER_CLASS} else "give other data"
    if OTHER_CLASS in tally.dropped and found.source.labels is not None:
        remedy = f"labels asks for {', '.join(found.source.labels)}"
    return f"nothing is left of the {tally.records:,} records of {found.root}: {reasons}; {remedy}"
