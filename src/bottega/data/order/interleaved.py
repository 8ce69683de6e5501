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

    Among the first n samples, each source is represented in proportion to its size.
    """

    def __init__(self, source: Source, rows_per_source: Sequence[int], *, name: str) -> None:
        """`rows_per_source` is the number of table rows of each source, in order; `name` is validation or test, for messages."""
        self.source = source
        ids = find_source_ids(source, rows_per_source)
        for source_id in range(len(rows_per_source)):
            if not (ids == source_id).any():
                raise DataError(
                    f"data.{name} has no sample of data.sources[{source_id}]; raise data.{name}.split, or add data"
                )
        rank = np.empty(len(ids))
        for source_id in np.unique(ids):
            members = np.flatnonzero(ids == source_id)
            rank[members] = (np.arange(len(members)) + 0.5) / len(members)
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


def find_source_ids(samples: Source, rows_per_source: Sequence[int]) -> np.ndarray:
    """Return the source id of each sample (n,), NO_SOURCE if the sample spans two sources."""
    ends = np.cumsum(rows_per_source)
    documents_at = getattr(samples, "documents_at", None)
    index = np.arange(len(samples))
    if documents_at is None:
        assert len(samples) == ends[-1], f"expected one sample per row, got {len(samples)} samples of {ends[-1]} rows"
        return np.searchsorted(ends, index, side="right")
    first_source, last_source = (np.searchsorted(ends, row, side="right") for row in documents_at(index))
    return np.where(first_source == last_source, first_source, NO_SOURCE)
