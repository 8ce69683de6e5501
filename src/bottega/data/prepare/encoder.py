"""The interface that turns records into table rows: the part of preparation that differs between media."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from bottega.data.records.record import BadRecord, Record, Unreadable
from bottega.data.tables.shards import Column

Row = dict[str, Any]


class Encoder(ABC):
    """Turns records into rows. Built from a recipe's options and sent to worker processes: small, picklable, stateless."""

    summed_entries: tuple[str, ...] = ()
    """Entries of a row that are summed over a table instead of stored."""

    @property
    def metadata(self) -> dict[str, Any]:
        """Plain values for meta.json that readers of the rows need."""
        return {}

    @property
    @abstractmethod
    def columns(self) -> dict[str, Column]:
        """Columns of every row. `key` (TEXT) is the record's key; `label` (TEXT) its class, if any."""

    @abstractmethod
    def rows(self, record: Record) -> Iterator[Row]:
        """Yield the rows of one record, usually one. Raises Unreadable if it cannot be decoded."""

    def encode(self, records: Iterable[tuple[str, Record]]) -> Iterator[tuple[str, Row | BadRecord]]:
        """Yield the rows of (table, record) pairs with their tables, in order."""
        for table, record in records:
            try:
                for row in self.rows(record):
                    yield table, row
            except Unreadable as error:
                yield table, BadRecord(record.key, record.where, str(error))
