"""A source: a finite set of samples that are fetched by index."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, final

import numpy as np

from bottega.core.errors import DataError


class Source(ABC):
    """Samples by index. A sample may depend on the epoch (augmentation), and on nothing else.

    Worker processes get a copy, so a source must be cheap to pickle: files are reopened rather than sent.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        """Return the samples `index` (n,) as of the epochs `epoch` (n,): arrays whose first axis is n."""

    @property
    def padding_values(self) -> Mapping[str, int]:
        """Padding value of each field (n, T, ...) with T the length of the longest row, for joining batches of several sources."""
        return {}

    def length_order(self, count: int) -> np.ndarray | None:
        """Return the first `count` samples ordered by length, or None if all have the same length.

        Evaluation uses this order, since a batch is padded to its longest sample.
        """
        return None

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of the content: sources with other samples have another fingerprint."""

    @abstractmethod
    def describe(self, index: int, epoch: int) -> str:
        """Return a description of one sample: where it comes from and what it holds."""


@final
class ArraySource(Source):
    """Arrays in memory whose first axis is the sample."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            raise DataError(f"a source needs at least one array, and all of the same length; got {lengths or 'none'}")
        self.arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        self.length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self.length

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        return {name: array[index] for name, array in self.arrays.items()}

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name, array in sorted(self.arrays.items()):
            digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
            digest.update(array.view(np.uint8).data if array.size else b"")
        return digest.hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        rows = self.rows(np.array([index]), np.array([epoch]))
        fields = (f"{name}: {np.array2string(row[0], threshold=32)}" for name, row in rows.items())
        return "\n".join((f"sample {index} of {len(self)}", *fields))
