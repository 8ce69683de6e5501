"""From a record to rows of our shards: the part of preparing that differs between media."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from bottega.data.records.record import BadRecord, Record, Unreadable
from bottega.data.tables.shards import Column

Row = dict[str, Any]


class Encoder(ABC):
    """Made from a recipe's options and sent to worker processes, so it is small, picklable and stateless."""

    summed_entries: tuple[str, ...] = ()
    """Entries of a row that are not stored but summed over a table."""

    @property
    def metadata(self) -> dict[str, Any]:
        """What a reader of the rows must know besides, as plain values for meta.json."""
        return {}

    @property
    @abstractmethod
    def columns(self) -> dict[str, Column]:
        """Of every row. `key` (TEXT) names the record; `label` (TEXT) is its class where it has one."""

    @abstractmethod
    def rows(self, record: Record) -> Iterator[Row]:
        """What is kept of one record: usually one row. Raises Unreadable where it cannot be decoded."""

    def encode(self, records: Iterable[tuple[str, Record]]) -> Iterator[tuple[str, Row | BadRecord]]:
        """The rows of many records, each with the table it belongs to, in order."""
        for table, record in records:
            try:
                for row in self.rows(record):
                    yield table, row
            except Unreadable as error:
                yield table, BadRecord(record.key, record.where, str(error))
