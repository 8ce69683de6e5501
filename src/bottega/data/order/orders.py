"""Sample orders as pure functions of the position: shuffled, mixed by weight, or as a curriculum from easy to hard.

The samplers of torch.utils.data are iterators: to resume at step s they are advanced s times. These orders are computed
at any position at equal cost, so that ranks, workers and restarts cannot change them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import final

import numpy as np

from bottega.core.noise import derive_seed
from bottega.data.order.permutation import permute

# Weights such as 7:2:1 are met exactly within a block of at most this many slots.
EXACT = 1024
# Block for any other weights: a weight of one in a million is met to one part in a thousand; products fit 64 bits.
BLOCK = 1 << 30
# Slots assigned at once if the block is longer than EXACT.
WINDOW = 256


class Order(ABC):
    """The sample at each position of an endless stream. No sample occurs twice in one epoch."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of samples."""

    @property
    def epoch_length(self) -> int:
        """Number of positions that count as one epoch of training."""
        return self.size

    @abstractmethod
    def indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sample indices at these positions and the epoch of each, both shaped like `positions`."""

    @abstractmethod
    def num_epochs(self, positions: int) -> int:
        """Return a number above all epochs that occur before this position."""


class OnlineOrder(Order):
    """An order that knows which positions show a sample for the first time."""

    @abstractmethod
    def is_new(self, positions: np.ndarray) -> np.ndarray:
        """Return which positions show a sample that no earlier position did; shaped like `positions`."""


@final
@dataclass(frozen=True)
class Shuffled(Order):
    """Every sample once per epoch, in another order each time."""

    length: int
    seed: int

    @property
    def size(self) -> int:
        return self.length

    def indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epoch = positions // self.length
        return permute(positions % self.length, size=self.length, seed=self.seed, epoch=epoch), epoch

    def num_epochs(self, positions: int) -> int:
        return -(-positions // self.length)


@final
@dataclass(frozen=True)
class Mixture(Order):
    """Several sources, numbered end to end, mixed by weight: each is a shuffled stream with epochs of its own.

    Slots of `slot_size` positions are assigned to the sources in windows. The number of slots of a source in a window
    follows from its quota up to there, so the weights are met to about one slot at the end of every window, and exactly
    at the end of every block; which slots they are is a keyed shuffle. With the batch size as `slot_size` every batch
    comes from one source.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int
    slot_size: int = 1

    def __post_init__(self) -> None:
        assert len(self.sizes) == len(self.weights) > 0, "each source has one size and one weight"
        assert min(*self.sizes, *self.weights, self.slot_size) > 0, "no source is empty or left out"

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @cached_property
    def quotas(self) -> tuple[int, ...]:
        """Number of slots of each source in a block."""
        return compute_quotas(self.weights)

    @cached_property
    def block(self) -> int:
        """Number of slots after which the weights are met exactly."""
        return sum(self.quotas)

    @cached_property
    def window(self) -> int:
        """Number of slots that are shuffled together."""
        return self.block if self.block <= EXACT else WINDOW

    @cached_property
    def seeds(self) -> list[int]:
        """Seed of the shuffle of each source."""
        return [derive_seed("mixture", self.seed, i) for i in range(len(self.sizes))]

    def num_drawn(self, positions: int) -> tuple[int, ...]:
        """Return how many of the first positions are of each source, counted to the last complete window."""
        slots = positions // (self.slot_size * self.window) * self.window
        return tuple((self._counts(np.array([slots]))[0] * self.slot_size).tolist())

    def indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        flat = np.asarray(positions, dtype=np.int64).ravel()
        source, number = self._assign_slots(flat // self.slot_size)
        number = number * self.slot_size + flat % self.slot_size
        epoch = number // np.array(self.sizes)[source]
        index = np.empty_like(number)
        offset = 0
        for i, size in enumerate(self.sizes):
            mine = np.flatnonzero(source == i)
            if len(mine):
                local = number[mine] % size
                index[mine] = offset + permute(local, size=size, seed=self.seeds[i], epoch=epoch[mine])
            offset += size
        return index.reshape(np.shape(positions)), epoch.reshape(np.shape(positions))

    def num_epochs(self, positions: int) -> int:
        windows = -(-positions // (self.slot_size * self.window))
        (counts,) = self._counts(np.array([windows * self.window])) * self.slot_size
        return int((-(-counts // np.array(self.sizes))).max())

    def _assign_slots(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each slot, and the number of earlier slots of that source."""
        width = self.window
        windows, row = np.unique(slots // width, return_inverse=True)
        before = self._counts(windows * width)
        ends = np.cumsum(self._counts((windows + 1) * width) - before, axis=1)
        rows = np.arange(len(windows))[:, None]
        # The cards of a window are numbered source by source; a shuffle deals them to its slots.
        deck = np.broadcast_to(np.arange(width), (len(windows), width))
        key = derive_seed("mixture", self.seed, -1)
        cards = permute(deck, size=width, seed=key, epoch=np.broadcast_to(windows[:, None], deck.shape))
        owner = np.searchsorted((ends + rows * width).ravel(), cards + rows * width, side="right")
        owner -= rows * len(self.sizes)
        # Ranked in the order of slots rather than cards, so that a source advances through its own stream.
        rank = np.empty_like(owner)
        np.put_along_axis(rank, np.argsort(owner, axis=1, kind="stable"), deck, axis=1)
        first = np.concatenate([np.zeros_like(rows), ends[:, :-1]], axis=1)
        number = rank + np.take_along_axis(before - first, owner, axis=1)
        at = slots % width
        return owner[row, at], number[row, at]

    def _counts(self, slots: np.ndarray) -> np.ndarray:
        """Return how many of the first `slots` (n,) are of each source: (n, sources), monotonic in `slots`."""
        blocks, rest = np.divmod(slots, self.block)
        counts = blocks[:, None] * np.array(self.quotas)
        total = self.block
        for i, quota in enumerate(self.quotas):
            mine = (rest * quota + total // 2) // total
            counts[:, i] += mine
            rest = rest - mine
            total -= quota
        return counts


def compute_quotas(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return positive integers in these proportions: exact with a sum of at most EXACT if possible, else with sum BLOCK."""
    total = math.fsum(weights)
    parts = [weight / total for weight in weights]
    fractions = [Fraction(part).limit_denominator(EXACT) for part in parts]
    block = math.lcm(*(fraction.denominator for fraction in fractions))
    close = all(abs(fraction - part) <= 1e-9 * part for fraction, part in zip(fractions, parts, strict=True))
    if close and block <= EXACT:
        return tuple(int(fraction * block) for fraction in fractions)
    ideal = [part * (BLOCK - len(parts)) for part in parts]
    quotas = [1 + int(amount) for amount in ideal]
    by_remainder = sorted(range(len(parts)), key=lambda i: int(ideal[i]) - ideal[i])
    for i in by_remainder[: BLOCK - sum(quotas)]:
        quotas[i] += 1
    return tuple(quotas)


@final
@dataclass(frozen=True)
class BatchSizeSchedule:
    """Batch size of each step: `batch_sizes[i]` from step `first_steps[i]` on."""

    first_steps: tuple[int, ...]
    batch_sizes: tuple[int, ...]

    @cached_property
    def start_positions(self) -> tuple[int, ...]:
        """The first position of each stage."""
        starts = [0]
        for (first, last), size in zip(pairwise(self.first_steps), self.batch_sizes, strict=False):
            starts.append(starts[-1] + (last - first) * size)
        return tuple(starts)

    def stage_at(self, step: int) -> int:
        """Return the stage of a step."""
        return bisect_right(self.first_steps, step) - 1

    def batch_size_at(self, step: int) -> int:
        """Return the batch size of a step."""
        return self.batch_sizes[self.stage_at(step)]

    def samples_before(self, step: int) -> int:
        """Return the number of samples in all steps before `step`."""
        stage = self.stage_at(step)
        return self.start_positions[stage] + (step - self.first_steps[stage]) * self.batch_sizes[stage]

    def step_at(self, samples: int) -> int:
        """Return the last step with at most `samples` samples before it."""
        stage = bisect_right(self.start_positions, samples) - 1
        return self.first_steps[stage] + (samples - self.start_positions[stage]) // self.batch_sizes[stage]


@final
@dataclass(frozen=True)
class CurriculumStage:
    """From `first_step` on, batches of `batch_size` from the `num_samples` easiest samples."""

    first_step: int
    batch_size: int
    num_samples: int
    replay_fraction: float = 0.0
    """Fraction drawn from the samples of the stage before; the rest is new in this stage."""


@final
@dataclass(frozen=True, eq=False)
class CurriculumOrder(Order):
    """A curriculum from easy to hard: each stage shuffles the easiest part of the ranking.

    Epochs are numbered through all stages, so that augmentation never repeats for a sample.
    """

    ranking: np.ndarray
    """All sample indices, the easiest first."""
    stages: tuple[CurriculumStage, ...]
    seed: int

    def __post_init__(self) -> None:
        firsts = [stage.first_step for stage in self.stages]
        assert firsts == sorted({0, *firsts}), "stages begin at 0 and one after the other"
        assert all(0 < stage.num_samples <= len(self.ranking) for stage in self.stages), "no stage is empty"

    @property
    def size(self) -> int:
        return len(self.ranking)

    @cached_property
    def schedule(self) -> BatchSizeSchedule:
        """The batch size of each stage."""
        return BatchSizeSchedule(tuple(s.first_step for s in self.stages), tuple(s.batch_size for s in self.stages))

    def indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        flat = np.asarray(positions, dtype=np.int64).ravel()
        stages = np.searchsorted(self.schedule.start_positions, flat, side="right") - 1
        index, epoch = np.empty_like(flat), np.empty_like(flat)
        for i in np.unique(stages):
            selected = np.flatnonzero(stages == i)
            local, local_epoch = self._orders[i].indices(flat[selected] - self.schedule.start_positions[i])
            # A mixture numbers new samples before replayed ones; the ranking has them after.
            new, old = self._new_and_replayed(i)
            index[selected] = self.ranking[np.where(local < new, local + old, local - new)]
            epoch[selected] = local_epoch + self._epochs_before[i]
        return index.reshape(np.shape(positions)), epoch.reshape(np.shape(positions))

    def num_epochs(self, positions: int) -> int:
        stage = max(0, bisect_right(self.schedule.start_positions, positions) - 1)
        return self._epochs_before[stage] + self._orders[stage].num_epochs(
            positions - self.schedule.start_positions[stage]
        )

    def _new_and_replayed(self, stage: int) -> tuple[int, int]:
        """Return the number of samples that are new in a stage, and of earlier ones that it replays."""
        count = self.stages[stage].num_samples
        old = self.stages[stage - 1].num_samples if stage and self.stages[stage].replay_fraction else 0
        return (count - old, old) if old < count else (count, 0)

    @cached_property
    def _orders(self) -> list[Order]:
        orders: list[Order] = []
        for i, stage in enumerate(self.stages):
            (new, old), seed = self._new_and_replayed(i), derive_seed("stage", self.seed, i)
            weights = (1 - stage.replay_fraction, stage.replay_fraction)
            orders.append(Mixture((new, old), weights, seed=seed) if old else Shuffled(new, seed))
        return orders

    @cached_property
    def _epochs_before(self) -> list[int]:
        before = [0]
        for order, (start, stop) in zip(self._orders, pairwise(self.schedule.start_positions), strict=False):
            before.append(before[-1] + order.num_epochs(stop - start))
        return before
