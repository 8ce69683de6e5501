"""What is seen at each step: one endless stream of samples, a function of the order and the global batch sizes alone.

Step s takes the positions samples_before(s) to samples_before(s + 1) of the order, so no sample is dropped at the border
of two epochs or stages, and ranks, workers and a restart cannot change what comes when.
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

# Positions permuted at once: 4,096 of them took no more than four times as long as eight.
BLOCK = 4096


@dataclass(frozen=True)
class Loader:
    """`loader(step)` gives this process's batches from that step on, for ever."""

    source: Source
    batch_size: int
    """The global one, over all ranks; stages of the order may have their own."""
    seed: int
    """Of the plain shuffle. An order that is given has its own."""
    data_rank: int = 0
    data_size: int = 1
    """Which share of each batch, of how many: those of `World`."""
    workers: int = 0
    prefetch: int = 0
    order: Order | None = None
    warn: Callable[[str], None] | None = field(default=None, compare=False, repr=False)
    """Told of workers that keep a batch waiting; None prints a line."""

    def __post_init__(self) -> None:
        size = len(self.source)
        if size < self.batch_size:
            raise DataError(
                f"the training data has {size} samples, fewer than one batch of {self.batch_size}; "
                "lower training.batch_size or add data"
            )
        assert self.order is None or self.order.size <= size, f"an order of {self.order} samples over {size}"
        is_staged = isinstance(self.order, CurriculumOrder)
        for stage, batch_size in enumerate(self.schedule.batch_sizes):
            if batch_size < 1 or batch_size % self.data_size:
                key = f"data.curriculum.stages[{stage}].batch_size" if is_staged else "training.batch_size"
                fitting = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
                raise UsageError(
                    f"{key}={batch_size} cannot be shared equally by {self.data_size} processes; "
                    f"it can by {', '.join(map(str, fitting)) or 'none'}"
                )

    @cached_property
    def schedule(self) -> BatchSizeSchedule:
        return (
            self.order.schedule
            if isinstance(self.order, CurriculumOrder)
            else BatchSizeSchedule((0,), (self.batch_size,))
        )

    @property
    def steps_per_epoch(self) -> float:
        """As many steps as see each sample once: with a mixture as many samples as there are, with stages all of them."""
        return self._order.epoch_length / self.batch_size

    def batch_size_at(self, step: int) -> int:
        return self.schedule.batch_size_at(step)

    def samples_before(self, step: int) -> int:
        return self.schedule.samples_before(step)

    def step_at(self, samples: int) -> int:
        """The last step with no more than so many samples before it."""
        return self.schedule.step_at(samples)

    def indices(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples of the whole global batch of this step, and the epochs they are in."""
        return self._order.indices(np.arange(self.samples_before(step), self.samples_before(step + 1)))

    def batch(self, step: int) -> Batch:
        """This rank's share of one step."""
        return Cursor(self, block=1)(step)

    def __call__(self, step: int) -> Generator[Batch, None, None]:
        sent = replace(self, warn=None)  # what workers get of it
        warn = self.warn or print_notice
        return prefetch(Cursor(sent, block=BLOCK), step, workers=self.workers, depth=self.prefetch, warn=warn)

    @cached_property
    def _order(self) -> Order:
        return Shuffled(len(self.source), self.seed) if self.order is None else self.order


class Cursor:
    """Builds one rank's batch of any step, remembering the order of the `block` positions from it on."""

    def __init__(self, loader: Loader, *, block: int) -> None:
        self.loader = loader
        self.block = block
        self.first = 0
        self.shares: list[tuple[np.ndarray, np.ndarray]] = []

    def __call__(self, step: int) -> Batch:
        at = step - self.first
        if not 0 <= at < len(self.shares):
            self._seek(step)
            at = step - self.first
        index, epoch = self.shares[at]
        return self.loader.source.rows(index, epoch)

    def _seek(self, step: int) -> None:
        loader, pace = self.loader, self.loader.schedule
        stage = pace.stage_at(step)
        size = pace.batch_sizes[stage]
        # What is remembered ends with the stage, because the next one may have batches of another size.
        last = min([step + max(1, self.block // size), *pace.first_steps[stage + 1 : stage + 2]])
        share = size // loader.data_size
        offset = pace.samples_before(step) + loader.data_rank * share + np.arange(share)
        index, epoch = loader._order.indices(np.arange(last - step)[:, None] * size + offset)
        self.first, self.shares = step, list(zip(index, epoch, strict=True))


def iter_eval_batches(
    source: Source,
    batch_size: int,
    *,
    data_rank: int = 0,
    data_size: int = 1,
    limit: int | None = None,
) -> Iterator[Batch]:
    """This process's share of every sample exactly once; `limit` keeps only the first ones. They come in their order, or
    those of like length together, as the source has it.

    A batch that the ranks cannot share equally is filled up with its last row. It then has a "weight" [b] that is 0 for
    what was filled up and 1 for the rest, on every rank. "index" [b] is the number of each sample: noise that is drawn
    for it does not depend on the batch.
    """
    size = len(source) if limit is None else min(limit, len(source))
    if size < 1:
        raise DataError("the validation data has no samples; add data or leave validation out")
    order = source.length_order(size)
    for first in range(0, size, batch_size):
        count = min(batch_size, size - first)
        share = -(-count // data_size)
        places = np.arange(data_rank * share, (data_rank + 1) * share)
        index = first + np.minimum(places, count - 1)
        index = index if order is None else order[index]
        batch = source.rows(index, np.zeros_like(index))
        if share * data_size != count:
            weight = (places < count).astype(np.float32)
            batch["weight"] = batch["weight"] * weight if "weight" in batch else weight
        yield {**batch, "index": index}
