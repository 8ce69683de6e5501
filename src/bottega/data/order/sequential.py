"""Sources one after the other, each for its own part of the run, with replay of samples of earlier sources.

Like all orders it is a pure function of the position, which no sampler of torch.utils.data is; see `orders`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import final

import numpy as np

from bottega.core.errors import UsageError
from bottega.core.noise import derive_seed
from bottega.data.order.orders import MAX_EXACT_SLOTS, Mixture, Order, Shuffled
from bottega.data.order.permutation import permute


@final
@dataclass(frozen=True)
class TurnSchedule:
    """When each source has its turn: the number of consecutive positions of each."""

    lengths: tuple[int, ...]

    @cached_property
    def start_positions(self) -> tuple[int, ...]:
        """The first position of each turn."""
        return tuple(accumulate(self.lengths[:-1], initial=0))

    def turns_at(self, positions: np.ndarray | int) -> np.ndarray:
        """Return the turn of each position; the last turn continues after the end."""
        return np.searchsorted(self.start_positions, positions, side="right") - 1

    def first_steps(self, batch_size: int) -> tuple[int, ...]:
        """Return the first step of each turn."""
        return tuple(start // batch_size for start in self.start_positions)

    def num_steps(self, batch_size: int) -> int:
        """Return the number of steps of all turns."""
        return sum(self.lengths) // batch_size


@final
@dataclass(frozen=True)
class Turn:
    """The part of a run that trains on one source."""

    start: int
    """First position."""
    length: int
    """Number of positions; the last turn continues after them."""
    offset: int
    """Index of the first sample of the source."""
    size: int
    """Number of samples of the source."""
    order: Shuffled | Mixture
    """Order within the turn: numbers below `size` are the source's samples, the others are replayed ones."""
    first_epoch: int
    """Replayed samples have epochs from here on, above all earlier ones, so that they are augmented differently."""

    @cached_property
    def num_seen(self) -> int:
        """Number of distinct samples of the source that the turn shows for certain, at least 1."""
        num_new = self.length if isinstance(self.order, Shuffled) else self.order.num_drawn(self.length)[0]
        return max(1, min(self.size, num_new))

    def first_samples(self, numbers: np.ndarray) -> np.ndarray:
        """Return the indices of the samples that the turn shows as its first, second and so on (`numbers` from 0)."""
        seed = self.order.seed if isinstance(self.order, Shuffled) else self.order.seeds[0]
        return self.offset + permute(numbers, size=self.size, seed=seed, epoch=0)


@final
@dataclass(frozen=True)
class ReplayMemory:
    """The samples of earlier turns that may be replayed: the first `capacity` that each turn showed, or all."""

    turns: tuple[Turn, ...]
    capacity: int | None

    @cached_property
    def ends(self) -> np.ndarray:
        """End of the samples of each turn, with all samples numbered turn by turn."""
        num_stored = [
            turn.num_seen if self.capacity is None else min(turn.num_seen, self.capacity) for turn in self.turns
        ]
        return np.cumsum(num_stored, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if self.turns else 0

    def indices(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sample indices of `numbers` in [0, len(self))."""
        owner = np.searchsorted(self.ends, numbers, side="right")
        indices = np.empty_like(numbers)
        for i in np.unique(owner).tolist():
            selected = np.flatnonzero(owner == i)
            indices[selected] = self.turns[i].first_samples(numbers[selected] - (int(self.ends[i - 1]) if i else 0))
        return indices


@final
@dataclass(frozen=True)
class Sequential(Order):
    """Sources in sequence, numbered end to end; each has a turn in proportion to its size: n epochs are n passes over each.

    Turns are whole batches, filled up with the beginning of another pass: a batch with only a few samples of classes
    never seen before gave a gradient of four times the usual norm, right before the source was evaluated. With a
    `replay_fraction`, that part of every turn but the first is drawn from samples of earlier turns, and the turn is
    longer by as much, so that its own samples are seen as often.
    """

    sizes: tuple[int, ...]
    seed: int
    turn_lengths: tuple[int, ...] | None = None
    """Positions of each turn; None is one pass over each source. The last turn continues after the end."""
    replay_fraction: float = 0.0
    memory_size: int | None = None
    """Number of samples of each earlier source that may be replayed; None is all."""

    def __post_init__(self) -> None:
        assert len(self.sizes) > 1, "a sequence needs several sources"
        assert min(self.sizes) > 0, "every source needs at least one sample"
        assert 0 <= self.replay_fraction < 1, f"replay_fraction must be in [0, 1), got {self.replay_fraction}"

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def epoch_length(self) -> int:
        return sum(self._pass_lengths)

    def plan_turns(self, steps: int, batch_size: int, *, epochs: float | None) -> Sequential:
        """Return the order with turns of whole batches, for a run of `epochs` passes, or of `steps` if that is None."""
        if epochs is not None:
            num_steps = [math.ceil(epochs * length / batch_size - 1e-9) for length in self._pass_lengths]
        else:
            ends = [round(steps * end / self.epoch_length) for end in accumulate(self._pass_lengths, initial=0)]
            num_steps = [end - start for start, end in pairwise(ends)]
        for source, count in enumerate(num_steps):
            if count < 1:
                raise UsageError(
                    f"data.sources[{source}] has {self.sizes[source]:,} of {self.size:,} samples, which is less than one step "
                    f"of a run of {steps} steps with {batch_size} samples each; train for longer, lower training.batch_size or add "
                    "data to it"
                )
        return replace(self, turn_lengths=tuple(count * batch_size for count in num_steps))

    @cached_property
    def schedule(self) -> TurnSchedule:
        """When each source has its turn."""
        return TurnSchedule(self._pass_lengths if self.turn_lengths is None else self.turn_lengths)

    def indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        flat = np.asarray(positions, dtype=np.int64).ravel()
        turn_numbers = self.schedule.turns_at(flat)
        index, epoch = np.empty_like(flat), np.empty_like(flat)
        for number in np.unique(turn_numbers).tolist():
            turn, selected = self._turns[number], np.flatnonzero(turn_numbers == number)
            local_index, local_epoch = turn.order.indices(flat[selected] - turn.start)
            is_new = local_index < turn.size
            index[selected] = local_index + turn.offset
            index[selected[~is_new]] = self._memories[number].indices(local_index[~is_new] - turn.size)
            epoch[selected] = np.where(is_new, local_epoch, local_epoch + turn.first_epoch)
        return index.reshape(np.shape(positions)), epoch.reshape(np.shape(positions))

    def num_epochs(self, num_positions: int) -> int:
        turn = self._turns[int(self.schedule.turns_at(num_positions))]
        return turn.first_epoch + turn.order.num_epochs(num_positions - turn.start)

    def first_samples(self, turn: int, count: int) -> np.ndarray:
        """Return the indices of the first `count` samples of its source that a turn shows, or of all if it shows fewer.

        Their order is random, so they are a uniform choice from the source.
        """
        return self._turns[turn].first_samples(np.arange(min(count, self._turns[turn].num_seen)))

    @cached_property
    def _pass_lengths(self) -> tuple[int, ...]:
        return compute_pass_lengths(self.sizes, self.replay_fraction)

    @cached_property
    def _turns(self) -> tuple[Turn, ...]:
        """The turns, built one after the other, since each may replay samples of the turns before it."""
        turns: list[Turn] = []
        for number, size in enumerate(self.sizes):
            seed, order = derive_seed("turn", self.seed, number), None
            if self.replay_fraction and number:
                num_replayable = len(ReplayMemory(tuple(turns), self.memory_size))
                weights = (1 - self.replay_fraction, self.replay_fraction)
                order = Mixture((size, num_replayable), weights, seed=seed)
            previous = turns[-1] if turns else None
            turns.append(
                Turn(
                    start=self.schedule.start_positions[number],
                    length=self.schedule.lengths[number],
                    offset=sum(self.sizes[:number]),
                    size=size,
                    order=order or Shuffled(size, seed),
                    first_epoch=previous.first_epoch + previous.order.num_epochs(previous.length) if previous else 0,
                )
            )
        return tuple(turns)

    @cached_property
    def _memories(self) -> list[ReplayMemory]:
        """The memory that each turn replays from."""
        return [ReplayMemory(self._turns[:number], self.memory_size) for number in range(len(self.sizes))]


def compute_pass_lengths(sizes: tuple[int, ...], replay_fraction: float) -> tuple[int, ...]:
    """Return the number of positions of one pass over each source, including the replayed samples."""
    if not replay_fraction:
        return sizes
    mixture = Mixture((1, 1), (1 - replay_fraction, replay_fraction), seed=0)
    num_new, _ = mixture.quotas
    lengths = [
        -(-size // num_new) * mixture.slots_per_block
        if mixture.slots_per_block <= MAX_EXACT_SLOTS
        else -(-size * mixture.slots_per_block // num_new)
        for size in sizes
    ]
    return (sizes[0], *lengths[1:])
