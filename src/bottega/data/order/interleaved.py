"""Held-out samples of several sources: whose each is, and an order in which every beginning has its share of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from bottega.core.errors import DataError
from bottega.data.sources.source import Source

NO_SOURCE = -1
"""Stands for the source of a window that reaches from one source into the next."""


@final
class Interleaved(Source):
    """Held-out samples of several sources, each with the number of its own in `source` [b].

    However many of the first are looked at, each source has its share of them.
    """

    def __init__(self, source: Source, rows: Sequence[int], *, name: str) -> None:
        """`rows` says how many rows of the table are of each source, one after the other; `name` is for messages."""
        self.source = source
        owner = find_source_ids(source, rows)
        for number in range(len(rows)):
            if not (owner == number).any():
                raise DataError(f"data.{name}: has no sample of data.sources[{number}]; raise its split, or add data")
        rank = np.empty(len(owner))
        for number in np.unique(owner):
            mine = np.flatnonzero(owner == number)
            rank[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
        self.order = np.argsort(rank, kind="stable")
        self.source_ids = owner[self.order]

    def __len__(self) -> int:
        return len(self.order)

    def inner_index(self, index: int) -> int:
        """Where a sample stands in the source behind it."""
        return int(self.order[index])

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        return {**self.source.rows(self.order[index], epoch), "source": self.source_ids[index]}

    @property
    def padding_values(self) -> Mapping[str, int]:
        return self.source.padding_values

    @property
    def fingerprint(self) -> str:
        return f"{self.source.fingerprint} spread"

    def describe(self, index: int, epoch: int) -> str:
        return self.source.describe(self.inner_index(index), epoch)


def find_source_ids(samples: Source, rows: Sequence[int]) -> np.ndarray:
    """The source of each sample [n], or NOBODY where it is of two."""
    ends = np.cumsum(rows)
    spans = getattr(samples, "documents_at", None)
    index = np.arange(len(samples))
    if spans is None:
        assert len(samples) == ends[-1], "a sample is a row"
        return np.searchsorted(ends, index, side="right")
    first, last = (np.searchsorted(ends, row, side="right") for row in spans(index))
    return np.where(first == last, first, NO_SOURCE)
