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
MAX_EXACT_SLOTS = 1024
# Length of a block for any other weights: a weight of one in a million is met to one part in a thousand; products fit 64 bits.
LONG_BLOCK_SLOTS = 1 << 30
# Number of slots assigned at once if the block is longer than MAX_EXACT_SLOTS.
WINDOW_SLOTS = 256


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
    def num_epochs(self, num_positions: int) -> int:
        """Return a number above all epochs that occur in the first `num_positions` positions."""


class OnlineOrder(Order):
    """An order that knows which positions show a sample for the first time."""

    @abstractmethod
    def is_new(self, positions: np.ndarray) -> np.ndarray:
        """Return which positions show a sample that no earlier position did; shaped like `positions`."""


@final
@dataclass(frozen=True)
class Shuffled(Order):
    """Every sample once per epoch, in a different order in each epoch."""

    length: int
    seed: int

    @property
    def size(self) -> int:
        return self.length

    def indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        epoch = positions // self.length
        return permute(positions % self.length, size=self.length, seed=self.seed, epoch=epoch), epoch

    def num_epochs(self, num_positions: int) -> int:
        return -(-num_positions // self.length)


@final
@dataclass(frozen=True)
class Mixture(Order):
    """Several sources, numbered end to end, mixed by weight: each is a shuffled stream with epochs of its own.

    Slots of `slot_size` positions are assigned to the sources in windows. The number of slots of a source in a window
    follows from its quota up to the end of that window, so the weights are met to about one slot at the end of every
    window, and exactly at the end of every block; a keyed shuffle decides which slots of the window they are. With the
    batch size as `slot_size` every batch comes from one source.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int
    slot_size: int = 1

    def __post_init__(self) -> None:
        assert len(self.sizes) == len(self.weights) > 0, "each source needs one size and one weight"
        assert min(*self.sizes, *self.weights, self.slot_size) > 0, "sizes, weights and slot_size must be positive"

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @cached_property
    def quotas(self) -> tuple[int, ...]:
        """Number of slots of each source in a block."""
        return compute_quotas(self.weights)

    @cached_property
    def slots_per_block(self) -> int:
        """Number of slots after which the weights are met exactly."""
        return sum(self.quotas)

    @cached_property
    def slots_per_window(self) -> int:
        """Number of slots that are shuffled together."""
        return self.slots_per_block if self.slots_per_block <= MAX_EXACT_SLOTS else WINDOW_SLOTS

    @cached_property
    def seeds(self) -> list[int]:
        """Seed of the shuffle of each source."""
        return [derive_seed("mixture", self.seed, i) for i in range(len(self.sizes))]

    def num_drawn(self, num_positions: int) -> tuple[int, ...]:
        """Return how many of the first `num_positions` are of each source, counted up to the last complete window."""
        num_slots = num_positions // (self.slot_size * self.slots_per_window) * self.slots_per_window
        return tuple((self._count_slots(np.array([num_slots]))[0] * self.slot_size).tolist())

    def indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        flat = np.asarray(positions, dtype=np.int64).ravel()
        source, stream_position = self._assign_slots(flat // self.slot_size)
        stream_position = stream_position * self.slot_size + flat % self.slot_size
        epoch = stream_position // np.array(self.sizes)[source]
        index = np.empty_like(stream_position)
        offset = 0
        for i, size in enumerate(self.sizes):
            selected = np.flatnonzero(source == i)
            if len(selected):
                local = stream_position[selected] % size
                index[selected] = offset + permute(local, size=size, seed=self.seeds[i], epoch=epoch[selected])
            offset += size
        return index.reshape(np.shape(positions)), epoch.reshape(np.shape(positions))

    def num_epochs(self, num_positions: int) -> int:
        num_windows = -(-num_positions // (self.slot_size * self.slots_per_window))
        (counts,) = self._count_slots(np.array([num_windows * self.slots_per_window])) * self.slot_size
        return int((-(-counts // np.array(self.sizes))).max())

    def _assign_slots(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each slot, and the number of earlier slots of that source."""
        width = self.slots_per_window
        windows, window_index = np.unique(slots // width, return_inverse=True)
        counts_before = self._count_slots(windows * width)
        ends = np.cumsum(self._count_slots((windows + 1) * width) - counts_before, axis=1)
        rows = np.arange(len(windows))[:, None]
        # Number the slots of a window source by source, then shuffle these numbers: each tells the source of one slot.
        slot_numbers = np.broadcast_to(np.arange(width), (len(windows), width))
        window_seed = derive_seed("mixture", self.seed, -1)
        epochs = np.broadcast_to(windows[:, None], slot_numbers.shape)
        shuffled = permute(slot_numbers, size=width, seed=window_seed, epoch=epochs)
        owner = np.searchsorted((ends + rows * width).ravel(), shuffled + rows * width, side="right")
        owner -= rows * len(self.sizes)
        # Slots of a source are ranked by position, not by shuffled number, so that a source advances through its own stream.
        rank = np.empty_like(owner)
        np.put_along_axis(rank, np.argsort(owner, axis=1, kind="stable"), slot_numbers, axis=1)
        starts = np.concatenate([np.zeros_like(rows), ends[:, :-1]], axis=1)
        num_earlier = rank + np.take_along_axis(counts_before - starts, owner, axis=1)
        slot_in_window = slots % width
        return owner[window_index, slot_in_window], num_earlier[window_index, slot_in_window]

    def _count_slots(self, num_slots: np.ndarray) -> np.ndarray:
        """Return how many of the first `num_slots` (n,) are of each source: (n, sources), monotonic in `num_slots`."""
        blocks, remaining = np.divmod(num_slots, self.slots_per_block)
        counts = blocks[:, None] * np.array(self.quotas)
        remaining_quota = self.slots_per_block
        for i, quota in enumerate(self.quotas):
            source_slots = (remaining * quota + remaining_quota // 2) // remaining_quota
            counts[:, i] += source_slots
            remaining = remaining - source_slots
            remaining_quota -= quota
        return counts


def compute_quotas(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return positive integers in these proportions: exact with a sum of at most MAX_EXACT_SLOTS if possible, else
    approximate with the sum LONG_BLOCK_SLOTS."""
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    fractions = [Fraction(share).limit_denominator(MAX_EXACT_SLOTS) for share in shares]
    block = math.lcm(*(fraction.denominator for fraction in fractions))
    is_exact = all(abs(fraction - share) <= 1e-9 * share for fraction, share in zip(fractions, shares, strict=True))
    if is_exact and block <= MAX_EXACT_SLOTS:
        return tuple(int(fraction * block) for fraction in fractions)
    ideal = [share * (LONG_BLOCK_SLOTS - len(shares)) for share in shares]
    quotas = [1 + int(amount) for amount in ideal]
    by_remainder = sorted(range(len(shares)), key=lambda i: int(ideal[i]) - ideal[i])
    for i in by_remainder[: LONG_BLOCK_SLOTS - sum(quotas)]:
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
        for (start_step, end_step), size in zip(pairwise(self.first_steps), self.batch_sizes, strict=False):
            starts.append(starts[-1] + (end_step - start_step) * size)
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
        first_steps = [stage.first_step for stage in self.stages]
        assert first_steps == sorted({0, *first_steps}), (
            "the first stage must begin at step 0, and each other stage after the one before it"
        )
        assert all(0 < stage.num_samples <= len(self.ranking) for stage in self.stages), (
            f"each stage needs between 1 and {len(self.ranking)} samples"
        )

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
            local_index, local_epoch = self._orders[i].indices(flat[selected] - self.schedule.start_positions[i])
            # A mixture numbers new samples before replayed ones; in the ranking the replayed, easier ones come first.
            num_new, num_replayed = self._count_new_and_replayed(i)
            index[selected] = self.ranking[
                np.where(local_index < num_new, local_index + num_replayed, local_index - num_new)
            ]
            epoch[selected] = local_epoch + self._epochs_before[i]
        return index.reshape(np.shape(positions)), epoch.reshape(np.shape(positions))

    def num_epochs(self, num_positions: int) -> int:
        stage = max(0, bisect_right(self.schedule.start_positions, num_positions) - 1)
        return self._epochs_before[stage] + self._orders[stage].num_epochs(
            num_positions - self.schedule.start_positions[stage]
        )

    def _count_new_and_replayed(self, stage: int) -> tuple[int, int]:
        """Return the number of samples that are new in a stage, and the number of earlier samples that it replays."""
        num_samples = self.stages[stage].num_samples
        num_replayed = self.stages[stage - 1].num_samples if stage and self.stages[stage].replay_fraction else 0
        return (num_samples - num_replayed, num_replayed) if num_replayed < num_samples else (num_samples, 0)

    @cached_property
    def _orders(self) -> list[Order]:
        orders: list[Order] = []
        for i, stage in enumerate(self.stages):
            (num_new, num_replayed), seed = self._count_new_and_replayed(i), derive_seed("stage", self.seed, i)
            weights = (1 - stage.replay_fraction, stage.replay_fraction)
            orders.append(
                Mixture((num_new, num_replayed), weights, seed=seed) if num_replayed else Shuffled(num_new, seed)
            )
        return orders

    @cached_property
    def _epochs_before(self) -> list[int]:
        offsets = [0]
        for order, (start, stop) in zip(self._orders, pairwise(self.schedule.start_positions), strict=False):
            offsets.append(offsets[-1] + order.num_epochs(stop - start))
        return offsets
