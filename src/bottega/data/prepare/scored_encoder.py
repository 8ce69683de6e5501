"""An encoder that adds a score column, for a curriculum by a field of the records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from bottega.data.prepare.encoder import Encoder, Row
from bottega.data.records.record import BadRecord, Record
from bottega.data.tables.shards import Column

SCORE_COLUMN = "score"


@dataclass(frozen=True)
class ScoredEncoder(Encoder):
    """The rows of the inner encoder with the number in `field` of their record as a score."""

    inner: Encoder
    field: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "summed_entries", self.inner.summed_entries)

    @property
    def metadata(self) -> dict[str, Any]:
        return {**self.inner.metadata, "score_field": self.field}

    @property
    def columns(self) -> dict[str, Column]:
        return {**self.inner.columns, SCORE_COLUMN: Column("<f8")}

    def rows(self, record: Record) -> Iterator[Row]:
        for row in self.inner.rows(record):
            yield {**row, SCORE_COLUMN: float(record.fields[self.field])}

    def encode(self, records: Iterable[tuple[str, Record]]) -> Iterator[tuple[str, Row | BadRecord]]:
        scores: dict[str, float] = {}
        bad_records: list[tuple[str, BadRecord]] = []

        def scored_records() -> Iterator[tuple[str, Record]]:
            for table, record in records:
                value = record.fields.get(self.field)
                try:
                    score = float(value)  # type: ignore[arg-type]
                except (TypeError, ValueError):
                    score = math.nan
                if math.isfinite(score):
                    scores[record.key] = score
                    yield table, record
                else:
                    reason = f"field {self.field!r} (data.curriculum.by) must be a number, not {value!r}"
                    bad_records.append((table, BadRecord(record.key, record.where, reason)))

        for table, row in self.inner.encode(scored_records()):
            while bad_records:
                yield bad_records.pop()
            if not isinstance(row, BadRecord):
                # An augmented copy has the key of its record with ~number appended.
                key = row["key"]
                row[SCORE_COLUMN] = scores[key] if key in scores else scores[key.rpartition("~")[0]]
            yield table, row
        yield from bad_records
