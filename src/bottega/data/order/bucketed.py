"""An order whose batches each hold samples of one shape, for data of several shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from bottega.data.order.orders import Mixture, Order


@final
@dataclass(frozen=True, eq=False)
class Bucketed(Order):
    """Each batch is of one bucket, chosen in proportion to the bucket's size; a bucket is a shuffled stream of its own.

    A batch at the end of a bucket's epoch is filled from the bucket's next epoch, so that no sample is dropped.
    """

    buckets: np.ndarray
    """The bucket of each sample (n,)."""
    batch_size: int
    seed: int

    @property
    def size(self) -> int:
        return len(self.buckets)

    def indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        index, epoch = self._mixture.indices(positions)
        return self._members[index], epoch

    def num_epochs(self, num_positions: int) -> int:
        return self._mixture.num_epochs(num_positions)

    @cached_property
    def _members(self) -> np.ndarray:
        """Sample indices, bucket by bucket."""
        return np.argsort(self.buckets, kind="stable")

    @cached_property
    def _mixture(self) -> Mixture:
        sizes = np.unique(self.buckets, return_counts=True)[1]
        weights = tuple((sizes / sizes.sum()).tolist())
        return Mixture(tuple(sizes.tolist()), weights, seed=self.seed, slot_size=self.batch_size)
