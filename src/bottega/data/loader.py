"""What is seen at each step: one endless stream of samples, a function of the seed and the global batch size alone.

Position g = step * batch_size + i of the stream is sample permute(g % size) of epoch g // size, so no sample is dropped
at the border of two epochs, and ranks, workers and a restart cannot change the order.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np

from bottega.core.errors import DataError, UsageError
from bottega.core.types import Batch
from bottega.data.order import permute
from bottega.data.prefetch import prefetch
from bottega.data.source import Source

# Positions permuted at once: 4,096 of them took no more than four times as long as eight.
BLOCK = 4096


@dataclass(frozen=True)
class Loader:
    """`loader(step)` gives this rank's batches from that step on, for ever."""

    source: Source
    batch_size: int
    """The global one, over all ranks."""
    seed: int
    rank: int = 0
    world: int = 1
    workers: int = 0
    prefetch: int = 0

    def __post_init__(self) -> None:
        size = len(self.source)
        if size < self.batch_size:
            raise DataError(
                f"the training data has {size} samples, fewer than one batch of {self.batch_size}; "
                "lower training.batch_size or add data"
            )
        if self.batch_size < 1 or self.batch_size % self.world:
            fitting = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            raise UsageError(
                f"training.batch_size={self.batch_size} cannot be shared equally by {self.world} processes; "
                f"it can by {', '.join(map(str, fitting)) or 'none'}"
            )

    @property
    def steps_per_epoch(self) -> float:
        return len(self.source) / self.batch_size

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples of the whole global batch of this step, and the epochs they are in."""
        return self.places(np.arange(step * self.batch_size, (step + 1) * self.batch_size))

    def batch(self, step: int) -> Batch:
        """This rank's share of one step."""
        return Cursor(self, block=1)(step)

    def __call__(self, step: int) -> Generator[Batch, None, None]:
        make = Cursor(self, block=max(1, BLOCK // self.batch_size))
        return prefetch(make, step, workers=self.workers, depth=self.prefetch)

    def places(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size = len(self.source)
        epoch = positions // size
        return permute(positions % size, size=size, seed=self.seed, epoch=epoch), epoch


class Cursor:
    """Builds one rank's batch of any step, remembering the order of the `block` steps around it."""

    def __init__(self, loader: Loader, *, block: int) -> None:
        self.loader = loader
        self.block = block
        self.first = 0
        self.shares: list[tuple[np.ndarray, np.ndarray]] = []

    def __call__(self, step: int) -> Batch:
        at = step - self.first
        if not 0 <= at < len(self.shares):
            self._seek(step // self.block * self.block)
            at = step - self.first
        index, epoch = self.shares[at]
        return self.loader.source.rows(index, epoch)

    def _seek(self, first: int) -> None:
        loader = self.loader
        share = loader.batch_size // loader.world
        steps = np.arange(first, first + self.block)
        offset = loader.rank * share + np.arange(share)
        index, epoch = loader.places(steps[:, None] * loader.batch_size + offset)
        self.first, self.shares = first, list(zip(index, epoch, strict=True))


def evaluate_batches(
    source: Source, batch_size: int, *, rank: int = 0, world: int = 1, limit: int | None = None
) -> Iterator[Batch]:
    """This rank's share of every sample exactly once, in order; `limit` keeps only the first ones.

    A batch that the ranks cannot share equally is filled up with its last row. It then has a "weight" [b] that is 0 for
    what was filled up and 1 for the rest, on every rank.
    """
    size = len(source) if limit is None else min(limit, len(source))
    if size < 1:
        raise DataError("the validation data has no samples; add data or leave validation out")
    for first in range(0, size, batch_size):
        count = min(batch_size, size - first)
        share = -(-count // world)
        places = np.arange(rank * share, (rank + 1) * share)
        index = first + np.minimum(places, count - 1)
        batch = source.rows(index, np.zeros_like(index))
        if share * world != count:
            weight = (places < count).astype(np.float32)
            batch["weight"] = batch["weight"] * weight if "weight" in batch else weight
        yield batch
