"""Several sources at once: a row is one sample of each, in a batch that has a block for each of them."""

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
    """One after the other, time after time: what lies side by side is shuffled by each part for itself."""

    length: int
    is_endless: bool = False
    """Whether the source has other samples in each epoch, so that nothing ever comes again."""

    @property
    def size(self) -> int:
        return self.length

    def is_new(self, positions: np.ndarray) -> np.ndarray:
        return (np.asarray(positions) < self.length) | self.is_endless

    def indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return positions % self.length, positions // self.length

    def num_epochs(self, positions: int) -> int:
        return -(-positions // self.length)


@final
class Zip(Source):
    """{part: {field: [n, ...]}}, as long as the longest part.

    With `orders`, to learn from: at each position of the endless stream a part has the sample that it would have there if
    it were alone, so a shorter one goes round, in an order of its own each time. Without, to measure: each sample once,
    in order, and a part that has ended gives its last sample with `weight` 0.
    """

    def __init__(
        self, sources: Mapping[str, Source], *, orders: Mapping[str, Order] | None = None, length: int | None = None
    ) -> None:
        """`length` is how many positions are an epoch; None is as many as the longest part has samples."""
        assert sources, "nothing lies side by side"
        assert orders is None or orders.keys() == sources.keys(), "each part has its order"
        self.sources = dict(sources)
        self.orders = dict(orders) if orders is not None else None
        self.length = length

    def __len__(self) -> int:
        return max(map(len, self.sources.values())) if self.length is None else self.length

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        if self.orders is not None:
            return {n: s.rows(*self._places(n, index, epoch)) for n, s in self.sources.items()}
        found: dict[str, Any] = {}
        for name, source in self.sources.items():
            last = len(source) - 1
            rows = source.rows(np.minimum(index, last), epoch)
            found[name] = {**rows, "weight": (index <= last).astype(np.float32) * rows.get("weight", 1.0)}
        return found

    def _places(self, name: str, index: Any, epoch: Any) -> tuple[np.ndarray, np.ndarray]:
        assert self.orders is not None
        return self.orders[name].indices(np.asarray(epoch * len(self) + index))

    @cached_property
    def padding_values(self) -> Mapping[str, int]:
        return {f"{part}.{name}": value for part, s in self.sources.items() for name, value in s.padding_values.items()}

    @cached_property
    def fingerprint(self) -> str:
        named = [f"{name} {source.fingerprint}" for name, source in self.sources.items()]
        return hashlib.sha256("\0".join(named).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        told = []
        for name, source in self.sources.items():
            place, own = index, epoch
            if self.orders is not None:
                place, own = (int(x[0]) for x in self._places(name, np.array([index]), np.array([epoch])))
            if place < len(source):
                told.append(f"{name}: {source.describe(place, own)}")
        return "\n".join(told)
