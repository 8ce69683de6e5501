"""Several sources zipped: a row is one sample of each, and a batch has one sub-dictionary per source."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from bottega.data.order.orders import OnlineOrder, Order
from bottega.data.sources.source import Source


@final
@dataclass(frozen=True)
class Unshuffled(OnlineOrder):
    """Samples in their own order, epoch after epoch; a Zip shuffles each of its sources itself."""

    length: int
    is_endless: bool = False
    """Whether the source has other samples in each epoch, so that every position is new."""

    @property
    def size(self) -> int:
        return self.length

    def is_new(self, positions: np.ndarray) -> np.ndarray:
        return (np.asarray(positions) < self.length) | self.is_endless

    def indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return positions % self.length, positions // self.length

    def num_epochs(self, num_positions: int) -> int:
        return -(-num_positions // self.length)


@final
class Zip(Source):
    """Rows {name: {field: (n, ...)}} of several sources, as long as the longest.

    With `orders`, for training: at each position a source has the sample it would have alone, so that shorter sources
    repeat in a new order. Without `orders`, for evaluation: each sample occurs once, in order, and a source that has ended
    repeats its last sample with `weight` 0.
    """

    def __init__(
        self, sources: Mapping[str, Source], *, orders: Mapping[str, Order] | None = None, length: int | None = None
    ) -> None:
        """`length` is the number of positions of an epoch; None is the length of the longest source."""
        assert sources, "no sources to zip"
        assert orders is None or orders.keys() == sources.keys(), "each source needs an order"
        self.sources = dict(sources)
        self.orders = dict(orders) if orders is not None else None
        self.length = length

    def __len__(self) -> int:
        return max(map(len, self.sources.values())) if self.length is None else self.length

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        if self.orders is not None:
            return {
                name: source.rows(*self._local_indices(name, index, epoch)) for name, source in self.sources.items()
            }
        result: dict[str, Any] = {}
        for name, source in self.sources.items():
            last = len(source) - 1
            rows = source.rows(np.minimum(index, last), epoch)
            result[name] = {**rows, "weight": (index <= last).astype(np.float32) * rows.get("weight", 1.0)}
        return result

    def _local_indices(self, name: str, index: Any, epoch: Any) -> tuple[np.ndarray, np.ndarray]:
        assert self.orders is not None
        return self.orders[name].indices(np.asarray(epoch * len(self) + index))

    @cached_property
    def padding_values(self) -> Mapping[str, int]:
        return {
            f"{name}.{field}": value
            for name, source in self.sources.items()
            for field, value in source.padding_values.items()
        }

    @cached_property
    def fingerprint(self) -> str:
        lines = [f"{name} {source.fingerprint}" for name, source in self.sources.items()]
        return hashlib.sha256("\0".join(lines).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        lines = []
        for name, source in self.sources.items():
            local, local_epoch = index, epoch
            if self.orders is not None:
                local, local_epoch = (
                    int(x[0]) for x in self._local_indices(name, np.array([index]), np.array([epoch]))
                )
            if local < len(source):
                lines.append(f"{name}: {source.describe(local, local_epoch)}")
        return "\n".join(lines)
