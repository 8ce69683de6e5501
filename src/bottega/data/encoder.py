"""From a record to rows of our shards: the part of preparing that differs between media."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from bottega.data.record import Record
from bottega.data.shards import Column


class Encoder(ABC):
    """Made from a recipe's options and sent to worker processes, so it is small, picklable and stateless."""

    @property
    @abstractmethod
    def columns(self) -> dict[str, Column]:
        """Of every row. `key` (TEXT) names the record; `label` (TEXT) is its class where it has one."""

    @abstractmethod
    def rows(self, record: Record) -> Iterator[dict[str, Any]]:
        """What is kept of one record: usually one row. Raises Unreadable where it cannot be decoded."""
