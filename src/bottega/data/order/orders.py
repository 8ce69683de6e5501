"""Which sample stands at which position of the endless stream: all of them shuffled, mixed by share, or easy ones first.

An order is a pure function of the position, so ranks, workers and a restart cannot change it, and a position far away
costs no more to find than the first one.
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

# Shares such as 7:2:1 come out exactly in a block of at most so many slots.
EXACT = 1024
# Any other shares: shares of one in a million are then met to one part in a thousand, and products stay within 64 bits.
BLOCK = 1 << 30
# Slots dealt at once where the block is too long for that.
WINDOW = 256


class Order(ABC):
    """No sample is seen twice in the same epoch, wherever the stream is entered."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many samples there are."""

    @property
    def epoch_length(self) -> int:
        """How many positions are what people call an epoch."""
        return self.size

    @abstractmethod
    def indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The samples at these positions, and which epoch each is seen in; shaped like `positions`."""

    @abstractmethod
    def num_epochs(self, positions: int) -> int:
        """All epochs begun before this position have a smaller number."""


class OnlineOrder(Order):
    """An order that is gone through as it comes, and so knows what has been there before."""

    @abstractmethod
    def is_new(self, positions: np.ndarray) -> np.ndarray:
        """Which positions show what none before them did; shaped like `positions`."""


@final
@dataclass(frozen=True)
class Shuffled(Order):
    """Every sample once an epoch, each epoch in another order."""

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
    """Several sources laid end to end, seen by share: each is a shuffled stream of its own, with its own epochs.

    The positions are dealt to the sources in windows. How many of a window a source gets follows from what it should
    have had by then, so the shares are kept to about a slot at the end of every window, and exactly at the end of every
    block; which of them is a keyed shuffle. `grain` positions in a row make one slot: with the batch size as grain all of
    a batch comes from one source.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int
    slot_size: int = 1

    def __post_init__(self) -> None:
        assert len(self.sizes) == len(self.weights) > 0, "each source has one size and one share"
        assert min(*self.sizes, *self.weights, self.slot_size) > 0, "no source is empty or left out"

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @cached_property
    def quotas(self) -> tuple[int, ...]:
        """How many slots of a block each source has."""
        return compute_quotas(self.weights)

    @cached_property
    def block(self) -> int:
        return sum(self.quotas)

    @cached_property
    def window(self) -> int:
        return self.block if self.block <= EXACT else WINDOW

    @cached_property
    def seeds(self) -> list[int]:
        """Of the shuffles of each source."""
        return [derive_seed("mixture", self.seed, i) for i in range(len(self.sizes))]

    def num_drawn(self, positions: int) -> tuple[int, ...]:
        """How many of the first so many positions each source has had for certain: to the end of a window."""
        slots = positions // (self.slot_size * self.window) * self.window
        return tuple((self._given(np.array([slots]))[0] * self.slot_size).tolist())

    def indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        flat = np.asarray(positions, dtype=np.int64).ravel()
        source, number = self._deal(flat // self.slot_size)
        number = number * self.slot_size + flat % self.slot_size
        epoch = number // np.array(self.sizes)[source]
        index = np.empty_like(number)
        offset = 0
        for i, size in enumerate(self.sizes):
            mine = np.flatnonzero(source == i)
            if len(mine):
                place = number[mine] % size
                index[mine] = offset + permute(place, size=size, seed=self.seeds[i], epoch=epoch[mine])
            offset += size
        return index.reshape(np.shape(positions)), epoch.reshape(np.shape(positions))

    def num_epochs(self, positions: int) -> int:
        windows = -(-positions // (self.slot_size * self.window))
        (given,) = self._given(np.array([windows * self.window])) * self.slot_size
        return int((-(-given // np.array(self.sizes))).max())

    def _deal(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whose each slot is, and how many slots that source had before it."""
        width = self.window
        windows, row = np.unique(slots // width, return_inverse=True)
        before = self._given(windows * width)
        ends = np.cumsum(self._given((windows + 1) * width) - before, axis=1)
        rows = np.arange(len(windows))[:, None]
        # The cards of a window are numbered source by source; a shuffle deals them to its slots.
        deck = np.broadcast_to(np.arange(width), (len(windows), width))
        key = derive_seed("mixture", self.seed, -1)
        cards = permute(deck, size=width, seed=key, epoch=np.broadcast_to(windows[:, None], deck.shape))
        owner = np.searchsorted((ends + rows * width).ravel(), cards + rows * width, side="right")
        owner -= rows * len(self.sizes)
        # In the order of the slots, not of the cards: a source goes through its own stream without a step back.
        rank = np.empty_like(owner)
        np.put_along_axis(rank, np.argsort(owner, axis=1, kind="stable"), deck, axis=1)
        first = np.concatenate([np.zeros_like(rows), ends[:, :-1]], axis=1)
        number = rank + np.take_along_axis(before - first, owner, axis=1)
        at = slots % width
        return owner[row, at], number[row, at]

    def _given(self, slots: np.ndarray) -> np.ndarray:
        """How many of the first `slots` [n] each source has had: [n, sources], never falling as slots grow."""
        blocks, rest = np.divmod(slots, self.block)
        given = blocks[:, None] * np.array(self.quotas)
        total = self.block
        for i, quota in enumerate(self.quotas):
            mine = (rest * quota + total // 2) // total
            given[:, i] += mine
            rest = rest - mine
            total -= quota
        return given


def compute_quotas(shares: tuple[float, ...]) -> tuple[int, ...]:
    """Whole numbers in these proportions, none of them 0: exact ones where they are small."""
    total = math.fsum(shares)
    parts = [share / total for share in shares]
    fractions = [Fraction(part).limit_denominator(EXACT) for part in parts]
    block = math.lcm(*(fraction.denominator for fraction in fractions))
    close = all(abs(fraction - part) <= 1e-9 * part for fraction, part in zip(fractions, parts, strict=True))
    if close and block <= EXACT:
        return tuple(int(fraction * block) for fraction in fractions)
    ideal = [part * (BLOCK - len(parts)) for part in parts]
    whole = [1 + int(amount) for amount in ideal]
    by_remainder = sorted(range(len(parts)), key=lambda i: int(ideal[i]) - ideal[i])
    for i in by_remainder[: BLOCK - sum(whole)]:
        whole[i] += 1
    return tuple(whole)


@final
@dataclass(frozen=True)
class BatchSizeSchedule:
    """How many samples each step takes: from step `firsts[i]` on, `sizes[i]`."""

    first_steps: tuple[int, ...]
    batch_sizes: tuple[int, ...]

    @cached_property
    def start_positions(self) -> tuple[int, ...]:
        """The position each stage begins at."""
        starts = [0]
        for (first, last), size in zip(pairwise(self.first_steps), self.batch_sizes, strict=False):
            starts.append(starts[-1] + (last - first) * size)
        return tuple(starts)

    def stage_at(self, step: int) -> int:
        return bisect_right(self.first_steps, step) - 1

    def batch_size_at(self, step: int) -> int:
        return self.batch_sizes[self.stage_at(step)]

    def samples_before(self, step: int) -> int:
        stage = self.stage_at(step)
        return self.start_positions[stage] + (step - self.first_steps[stage]) * self.batch_sizes[stage]

    def step_at(self, samples: int) -> int:
        """The last step that has no more samples before it."""
        stage = bisect_right(self.start_positions, samples) - 1
        return self.first_steps[stage] + (samples - self.start_positions[stage]) // self.batch_sizes[stage]


@final
@dataclass(frozen=True)
class CurriculumStage:
    """From step `first` on: batches of `batch_size` from the `count` easiest samples."""

    first_step: int
    batch_size: int
    num_samples: int
    replay_fraction: float = 0.0
    """This share from the samples of the stage before, the rest from what is new."""


@final
@dataclass(frozen=True, eq=False)
class CurriculumOrder(Order):
    """From easy to hard: each stage shuffles its own part of the ranking, from its own beginning.

    Epochs are numbered on from stage to stage, so that a sample never looks the same twice.
    """

    ranking: np.ndarray
    """All sample numbers, the easiest first."""
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
        return BatchSizeSchedule(tuple(s.first_step for s in self.stages), tuple(s.batch_size for s in self.stages))

    def indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        flat = np.asarray(positions, dtype=np.int64).ravel()
        stages = np.searchsorted(self.schedule.start_positions, flat, side="right") - 1
        index, epoch = np.empty_like(flat), np.empty_like(flat)
        for i in np.unique(stages):
            here = np.flatnonzero(stages == i)
            place, own = self._orders[i].indices(flat[here] - self.schedule.start_positions[i])
            # A mixture has what is new before what is old; the ranking has it after.
            new, old = self._parts(i)
            index[here] = self.ranking[np.where(place < new, place + old, place - new)]
            epoch[here] = own + self._epochs_before[i]
        return index.reshape(np.shape(positions)), epoch.reshape(np.shape(positions))

    def num_epochs(self, positions: int) -> int:
        stage = max(0, bisect_right(self.schedule.start_positions, positions) - 1)
        return self._epochs_before[stage] + self._orders[stage].num_epochs(
            positions - self.schedule.start_positions[stage]
        )

    def _parts(self, stage: int) -> tuple[int, int]:
        """How many samples are new in a stage, and how many are old ones that it repeats."""
        count = self.stages[stage].num_samples
        old = self.stages[stage - 1].num_samples if stage and self.stages[stage].replay_fraction else 0
        return (count - old, old) if old < count else (count, 0)

    @cached_property
    def _orders(self) -> list[Order]:
        orders: list[Order] = []
        for i, stage in enumerate(self.stages):
            (new, old), seed = self._parts(i), derive_seed("stage", self.seed, i)
            shares = (1 - stage.replay_fraction, stage.replay_fraction)
            orders.append(Mixture((new, old), shares, seed=seed) if old else Shuffled(new, seed))
        return orders

    @cached_property
    def _epochs_before(self) -> list[int]:
        before = [0]
        for order, (start, stop) in zip(self._orders, pairwise(self.schedule.start_positions), strict=False):
            before.append(before[-1] + order.num_epochs(stop - start))
        return before
