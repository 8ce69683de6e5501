"""A data loader whose only state is the step: batches are a pure function of the order and the global batch sizes.

Step s has the positions samples_before(s) to samples_before(s + 1) of the order, so that no sample is dropped between two
epochs or stages, and ranks, workers and restarts cannot change the batches. torch's DataLoader cannot promise that: it
has no seek, and what it yields depends on the number of ranks and workers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from bottega.core.errors import DataError, UsageError
from bottega.core.types import Batch
from bottega.data.loading.prefetch import prefetch
from bottega.data.order.orders import BatchSizeSchedule, CurriculumOrder, Order, Shuffled
from bottega.data.sources.source import Source
from bottega.terminal import print_notice

# Positions of the order computed at once: 4,096 take at most four times as long as eight.
POSITIONS_AT_ONCE = 4096


@dataclass(frozen=True)
class Loader:
    """`loader(step)` iterates over this process's batches from that step on, endlessly."""

    source: Source
    batch_size: int
    """Global batch size, over all ranks; stages of a curriculum may have their own."""
    seed: int
    """Seed of the default shuffle; a given `order` has its own."""
    data_rank: int = 0
    data_size: int = 1
    """Which part of each batch this process has, and the number of parts, as in `World`."""
    workers: int = 0
    """Number of worker processes; 0 builds batches in this process."""
    prefetch: int = 0
    """Number of batches that a thread keeps ready; 0 builds each when it is requested."""
    order: Order | None = None
    warn: Callable[[str], None] | None = field(default=None, compare=False, repr=False)
    """Called with a message about workers that delay a batch; None prints it."""

    def __post_init__(self) -> None:
        size = len(self.source)
        if size < self.batch_size:
            raise DataError(
                f"the training data has {size} samples, fewer than one batch of {self.batch_size}; "
                "lower training.batch_size or add data"
            )
        assert self.order is None or self.order.size <= size, f"{self.order} has more samples than the source ({size})"
        is_staged = isinstance(self.order, CurriculumOrder)
        for stage, batch_size in enumerate(self.schedule.batch_sizes):
            if batch_size < 1 or batch_size % self.data_size:
                key = f"data.curriculum.stages[{stage}].batch_size" if is_staged else "training.batch_size"
                divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
                raise UsageError(
                    f"{key}={batch_size} cannot be divided equally among {self.data_size} processes; "
                    f"use a multiple of {self.data_size}, or a number of processes that divides it "
                    f"({', '.join(map(str, divisors))})"
                )

    @cached_property
    def schedule(self) -> BatchSizeSchedule:
        """The global batch size of each step."""
        return (
            self.order.schedule
            if isinstance(self.order, CurriculumOrder)
            else BatchSizeSchedule((0,), (self.batch_size,))
        )

    @property
    def steps_per_epoch(self) -> float:
        """Steps per epoch of the order at `batch_size`; may be fractional."""
        return self._order.epoch_length / self.batch_size

    def batch_size_at(self, step: int) -> int:
        """Return the global batch size of a step."""
        return self.schedule.batch_size_at(step)

    def samples_before(self, step: int) -> int:
        """Return the number of samples in all steps before `step`."""
        return self.schedule.samples_before(step)

    def step_at(self, samples: int) -> int:
        """Return the last step with at most `samples` samples before it."""
        return self.schedule.step_at(samples)

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sample indices of the global batch of a step, and the epoch of each."""
        return self._order.indices(np.arange(self.samples_before(step), self.samples_before(step + 1)))

    def batch(self, step: int) -> Batch:
        """Return this rank's part of the batch of one step."""
        return Cursor(self, block=1)(step)

    def __call__(self, step: int) -> Generator[Batch, None, None]:
        picklable = replace(self, warn=None)  # for worker processes
        warn = self.warn or print_notice
        return prefetch(
            Cursor(picklable, block=POSITIONS_AT_ONCE), step, workers=self.workers, depth=self.prefetch, warn=warn
        )

    @cached_property
    def _order(self) -> Order:
        return Shuffled(len(self.source), self.seed) if self.order is None else self.order


class Cursor:
    """Builds one rank's batch of any step; indices are computed and cached for about `block` positions at once."""

    def __init__(self, loader: Loader, *, block: int) -> None:
        self.loader = loader
        self.block = block
        self.first_step = 0
        """The step of `indices[0]`."""
        self.indices: list[tuple[np.ndarray, np.ndarray]] = []

    def __call__(self, step: int) -> Batch:
        offset = step - self.first_step
        if not 0 <= offset < len(self.indices):
            self._seek(step)
            offset = step - self.first_step
        index, epoch = self.indices[offset]
        return self.loader.source.rows(index, epoch)

    def _seek(self, step: int) -> None:
        loader, schedule = self.loader, self.loader.schedule
        stage = schedule.stage_at(step)
        batch_size = schedule.batch_sizes[stage]
        # The cached range ends with the stage, since the next stage may have a different batch size.
        end = min([step + max(1, self.block // batch_size), *schedule.first_steps[stage + 1 : stage + 2]])
        local_size = batch_size // loader.data_size
        first_positions = schedule.samples_before(step) + loader.data_rank * local_size + np.arange(local_size)
        index, epoch = loader._order.indices(np.arange(end - step)[:, None] * batch_size + first_positions)
        self.first_step, self.indices = step, list(zip(index, epoch, strict=True))


def iter_eval_batches(
    source: Source,
    batch_size: int,
    *,
    data_rank: int = 0,
    data_size: int = 1,
    limit: int | None = None,
) -> Iterator[Batch]:
    """Yield this process's part of batches with every sample exactly once, or with the first `limit` samples.

    Samples come in the order of the source, or sorted by length if the source has a `length_order`. A batch that the ranks
    cannot divide equally is filled up with its last row, and then has "weight" (batch,), 0 for the filler and 1 otherwise, on
    every rank. "index" (batch,) is the index of each sample, from which evaluation noise is drawn.
    """
    size = len(source) if limit is None else min(limit, len(source))
    if size < 1:
        raise DataError("the validation data has no samples; add data or remove data.validation")
    order = source.length_order(size)
    for first in range(0, size, batch_size):
        count = min(batch_size, size - first)
        local_size = -(-count // data_size)
        local_positions = np.arange(data_rank * local_size, (data_rank + 1) * local_size)
        index = first + np.minimum(local_positions, count - 1)
        index = index if order is None else order[index]
        batch = source.rows(index, np.zeros_like(index))
        if local_size * data_size != count:
            weight = (local_positions < count).astype(np.float32)
            batch["weight"] = batch["weight"] * weight if "weight" in batch else weight
        yield {**batch, "index": index}
