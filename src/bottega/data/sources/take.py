"""The first samples of a source, for trial runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import numpy as np

from bottega.data.sources.source import Source


@final
class Take(Source):
    """The first `limit` samples of another source."""

    def __init__(self, source: Source, limit: int) -> None:
        self.source, self.limit = source, limit

    def __len__(self) -> int:
        return min(self.limit, len(self.source))

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        return self.source.rows(index, epoch)

    def length_order(self, count: int) -> np.ndarray | None:
        return self.source.length_order(count)

    @property
    def padding_values(self) -> Mapping[str, int]:
        return self.source.padding_values

    @property
    def fingerprint(self) -> str:
        return f"{self.source.fingerprint} first {len(self)}"

    def describe(self, index: int, epoch: int) -> str:
        return self.source.describe(index, epoch)
