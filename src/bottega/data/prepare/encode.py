"""Encode all records into tables: jobs read, filter, encode and write them, and the results are merged."""

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
    """Jobs that read pieces of the inputs and write the rows of their records to tables."""

    inputs: tuple[Input, ...]
    jobs: tuple[tuple[Item, ...], ...]
    folder: Path
    sizes: tuple[int, ...]
    rules: Rules
    encoder: Encoder
    tables: tuple[str, ...]
    decisions: Decisions | None
    stop_on_bad: bool
    """Whether a bad record is an error."""
    stage: str = "encode"

    def num_pieces(self, number: int) -> int:
        return len(self.jobs[number])

    def run_job(self, number: int, out: Path) -> dict[str, Any]:
        tally = Tally()
        counts: dict[str, Counter[str]] = {}
        with ExitStack() as stack:
            writers: dict[str, ShardWriter] = {}
            for table, row in self.encoder.encode(self._read_assigned_records(number, tally)):
                if isinstance(row, BadRecord):
                    tally.count_bad(row, stop=self.stop_on_bad)
                    continue
                if table not in writers:
                    writers[table] = stack.enter_context(ShardWriter(out / table, self.encoder.columns))
                    counts[table] = Counter()
                writers[table].add(row)
                counts[table].update({name: row[name] for name in self.encoder.summed_entries})
        return {"tables": counts, **vars(tally)}

    def _read_assigned_records(self, number: int, tally: Tally) -> Iterator[tuple[str, Record]]:
        """Yield the records that are kept, each with its table."""
        table_numbers = self.decisions.for_job(number) if self.decisions is not None else None
        position = -1
        for item in self.jobs[number]:
            for record in read_records(self.inputs, item, self.rules):
                position += 1
                tally.records += 1
                if isinstance(record, BadRecord):
                    tally.count_bad(record, stop=self.stop_on_bad)
                elif isinstance(record, DroppedRecord):
                    tally.dropped[record.reason] = tally.dropped.get(record.reason, 0) + 1
                elif table_numbers is None or item.table is not None:
                    yield item.table or self.inputs[item.input].table, record
                elif table_numbers[position] >= 0:
                    yield self.tables[table_numbers[position]], record


def encode_tables(
    jobs: EncodeJobs, folder: Path, *, max_bad: float | None, progress: ProgressCallback
) -> dict[str, Any]:
    """Run all jobs and merge their results into one folder per table in `folder`; return counts for meta.json."""
    tally = Tally()
    counts: dict[str, Counter[str]] = {}
    tally_by_input: defaultdict[int, Tally] = defaultdict(Tally)
    for number, summary in enumerate(run_jobs(jobs, progress)):
        tally.add(summary)
        tally_by_input[jobs.jobs[number][0].input].add(summary)
        for table, table_counts in summary["tables"].items():
            counts.setdefault(table, Counter()).update(table_counts)
    tally.check(max_bad)
    folders = [jobs.job_folder(number) for number in range(len(jobs.jobs))]
    tables = {}
    for table in jobs.tables:
        to_merge = [job_folder / table for job_folder in folders if (job_folder / table).is_dir()]
        if not to_merge:
            # Otherwise an empty held-out table would only be noticed at the first evaluation, or at the end of the run.
            raise DataError(_explain_empty(table, jobs.inputs, tally_by_input))
        rows = merge_tables(to_merge, folder / table, jobs.encoder.columns)
        tables[table] = {"rows": rows, **counts.get(table, {})}
    return {"tables": tables, **vars(tally), **_count_by_source(jobs, folders)}


def _count_by_source(jobs: EncodeJobs, folders: list[Path]) -> dict[str, dict[str, list[int]]]:
    """Return the number of held-out rows of each source of a sequence; the rows are in the order of the sources."""
    source_indices = [jobs.inputs[job[0].input].source_index for job in jobs.jobs]
    by_source: dict[str, list[int]] = {}
    for table in ("validation", "test"):
        rows = [
            (source_index, len(Table(folder / table)))
            for source_index, folder in zip(source_indices, folders, strict=True)
            if (folder / table).is_dir()
        ]
        sources = [source_index for source_index, _ in rows if source_index is not None]
        if rows and len(sources) == len(rows):
            counts = [0] * (1 + max(source_index for source_index in source_indices if source_index is not None))
            for source_index, count in zip(sources, (count for _, count in rows), strict=True):
                counts[source_index] += count
            by_source[table] = counts
    return {"by_source": by_source} if by_source else {}


def _explain_empty(table: str, inputs: tuple[Input, ...], tallies: Mapping[int, Tally]) -> str:
    """Return why a table is empty."""
    number = next((n for n, input in enumerate(inputs) if input.table == table), None)
    if number is None:  # a fraction of train
        return f"data.{table} is empty: no record was assigned to it; raise data.{table}.split, or add data"
    files, tally = inputs[number].source_files, tallies[number]
    if tally.bad and tally.bad == tally.records:
        return f"all {tally.bad:,} records of {files.root} are bad; the first is {tally.named[0]}"
    if not tally.records:
        where = files.paths[0] if len(files.paths) == 1 else f"the {len(files.paths)} files of {files.root}"
        return f"{where} {'is' if len(files.paths) == 1 else 'are all'} empty; give a file with data in it"
    duplicates = tally.records - tally.bad - sum(tally.dropped.values())
    counts = {**tally.dropped, "bad": tally.bad, "duplicate": duplicates}
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items()) if count)
    remedy = "loosen data.filter" if tally.dropped.keys() - {"empty", OTHER_CLASS} else "give other data"
    if OTHER_CLASS in tally.dropped and files.source.labels is not None:
        remedy = f"labels keeps only {', '.join(files.source.labels)}; name classes that the data has"
    return f"none of the {tally.records:,} records of {files.root} is left: {reasons}; {remedy}"
