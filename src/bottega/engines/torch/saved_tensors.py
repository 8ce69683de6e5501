"""How many bytes autograd keeps for backward, counted while they live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class SavedTensorMeter:
    """Counts the bytes that autograd holds, each storage once, and remembers the most there were at a time."""

    def __init__(self, models: Iterable[Any]) -> None:
        # Weights are there in any case.
        self._known = {
            t.untyped_storage().data_ptr() for model in models for t in (*model.parameters(), *model.buffers())
        }
        self._holders: Counter[int] = Counter()
        self.now = self.peak = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Held(tensor, self), lambda held: held.tensor):
            yield

    def change(self, storage: int, size: int, *, by: int) -> None:
        if storage in self._known:
            return
        self._holders[storage] += by
        if (by > 0 and self._holders[storage] == 1) or (by < 0 and self._holders[storage] == 0):
            self.now += by * size
            self.peak = max(self.peak, self.now)


class _Held:
    """One saved tensor, for as long as autograd needs it."""

    __slots__ = ("meter", "size", "storage", "tensor")

    def __init__(self, tensor: Tensor, meter: SavedTensorMeter) -> None:
        self.tensor, self.meter = tensor.detach(), meter
        self.storage, self.size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        meter.change(self.storage, self.size, by=1)

    def __del__(self) -> None:
        self.meter.change(self.storage, self.size, by=-1)
