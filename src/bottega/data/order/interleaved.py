"""Held-out samples of several sources, interleaved so that every prefix represents all sources by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from bottega.core.errors import DataError
from bottega.data.sources.source import Source

NO_SOURCE = -1
"""Source id of a window that spans two sources."""


@final
class Interleaved(Source):
    """Held-out samples of several sources, each with its source id in `source` (batch,).

    In the first n samples each source has its fraction of n.
    """

    def __init__(self, source: Source, rows: Sequence[int], *, name: str) -> None:
        """`rows` are the numbers of table rows of each source, in order; `name` is the key of the data for messages."""
        self.source = source
        ids = find_source_ids(source, rows)
        for number in range(len(rows)):
            if not (ids == number).any():
                raise DataError(
                    f"data.{name} has no sample of data.sources[{number}]; raise data.{name}.split, or add data"
                )
        rank = np.empty(len(ids))
        for number in np.unique(ids):
            mine = np.flatnonzero(ids == number)
            rank[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
        self.order = np.argsort(rank, kind="stable")
        self.source_ids = ids[self.order]

    def __len__(self) -> int:
        return len(self.order)

    def inner_index(self, index: int) -> int:
        """Return the index of a sample in the wrapped source."""
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
    """Return the source id of each sample (n,), NO_SOURCE if it spans two."""
    ends = np.cumsum(rows)
    spans = getattr(samples, "documents_at", None)
    index = np.arange(len(samples))
    if spans is None:
        assert len(samples) == ends[-1], "expected one sample per row"
        return np.searchsorted(ends, index, side="right")
    first, last = (np.searchsorted(ends, row, side="right") for row in spans(index))
    return np.where(first == last, first, NO_SOURCE)
