"""Memory of the tensors that autograd saves for backward, counted while they live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class SavedTensorMeter:
    """Counts the bytes that autograd holds, each storage once, and records their peak."""

    def __init__(self, models: Iterable[Any]) -> None:
        # Weights are in memory in any case, so they are not counted.
        self._weights = {
            t.untyped_storage().data_ptr() for model in models for t in (*model.parameters(), *model.buffers())
        }
        self._holders: Counter[int] = Counter()
        self.current_bytes = self.peak_bytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context in which saved tensors are counted."""
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _SavedTensor(tensor, self), lambda saved: saved.tensor
        ):
            yield

    def change(self, storage: int, size: int, *, by: int) -> None:
        """Count one more (by=1) or one fewer (by=-1) tensor that holds a storage of `size` bytes."""
        if storage in self._weights:
            return
        self._holders[storage] += by
        if (by > 0 and self._holders[storage] == 1) or (by < 0 and self._holders[storage] == 0):
            self.current_bytes += by * size
            self.peak_bytes = max(self.peak_bytes, self.current_bytes)


class _SavedTensor:
    """One saved tensor, for as long as autograd needs it."""

    __slots__ = ("meter", "size", "storage", "tensor")

    def __init__(self, tensor: Tensor, meter: SavedTensorMeter) -> None:
        self.tensor, self.meter = tensor.detach(), meter
        self.storage, self.size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        meter.change(self.storage, self.size, by=1)

    def __del__(self) -> None:
        self.meter.change(self.storage, self.size, by=-1)
