"""Sources one after the other: which sample stands where, and what is remembered of earlier ones."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import final

import numpy as np

from bottega.core.errors import UsageError
from bottega.core.noise import derive_seed
from bottega.data.order.orders import EXACT, Mixture, Order, Shuffled
from bottega.data.order.permutation import permute


@final
@dataclass(frozen=True)
class Sequential(Order):
    """Sources laid end to end, each for its part of the run by size, so that a run of n epochs is n passes over each.

    A turn is of whole batches, filled up with the beginning of another pass: a few samples of classes never seen before
    gave a gradient of four times the usual norm, right before the one source was measured. With a `share`, so much of
    each later turn comes from the samples that were seen before it, and the turn is longer by that: what is new is still
    seen as often.
    """

    sizes: tuple[int, ...]
    seed: int
    lengths: tuple[int, ...] | None = None
    """Positions of each turn; None is one pass. After the end the last turn goes on."""
    share: float = 0.0
    memory: int | None = None
    """So many samples of each earlier source are kept; None keeps all."""

    def __post_init__(self) -> None:
        assert len(self.sizes) > 1, "a sequence is of several sources"
        assert min(self.sizes) > 0, "no source is empty"
        assert 0 <= self.share < 1, f"{self.share} of a batch"

    @property
    def size(self) -> int:
        return sum(self.sizes)

    @property
    def epoch_length(self) -> int:
        return sum(self._passes)

    def plan_turns(self, steps: int, batch_size: int, *, epochs: float | None) -> Sequential:
        """In whole batches: for a run of so many steps, or of so many epochs where that is what was asked for."""
        if epochs is not None:
            turns = [math.ceil(epochs * length / batch_size - 1e-9) for length in self._passes]
        else:
            ends = [round(steps * end / self.epoch_length) for end in accumulate(self._passes, initial=0)]
            turns = [end - start for start, end in pairwise(ends)]
        for number, turn in enumerate(turns):
            if turn < 1:
                raise UsageError(
                    f"data.sources[{number}] has {self.sizes[number]:,} of {self.size:,} samples, and of {steps} steps of "
                    f"{batch_size} not one is its own; train for longer, lower training.batch_size or give it more data"
                )
        return replace(self, lengths=tuple(turn * batch_size for turn in turns))

    def first_steps(self, batch_size: int) -> tuple[int, ...]:
        """The first step of each turn."""
        return tuple(start // batch_size for start in self.starts)

    def num_steps(self, batch_size: int) -> int:
        return sum(self._lengths) // batch_size

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The position each turn begins at."""
        return tuple(accumulate(self._lengths[:-1], initial=0))

    @property
    def _lengths(self) -> tuple[int, ...]:
        return self._passes if self.lengths is None else self.lengths

    def indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        flat = np.asarray(positions, dtype=np.int64).ravel()
        turns = np.searchsorted(self.starts, flat, side="right") - 1
        index, epoch = np.empty_like(flat), np.empty_like(flat)
        for turn in np.unique(turns).tolist():
            here = np.flatnonzero(turns == turn)
            place, own = self._orders[turn].indices(flat[here] - self.starts[turn])
            is_new = place < self.sizes[turn]
            index[here] = place + self._offsets[turn]
            index[here[~is_new]] = self._remembered(turn, place[~is_new] - self.sizes[turn])
            # What comes back is seen in epochs that nothing was seen in before, so that it looks new to augmentation.
            epoch[here] = np.where(is_new, own, own + self._epochs_before[turn])
        return index.reshape(np.shape(positions)), epoch.reshape(np.shape(positions))

    def num_epochs(self, positions: int) -> int:
        turn = max(0, bisect_right(self.starts, positions) - 1)
        return self._epochs_before[turn] + self._orders[turn].num_epochs(positions - self.starts[turn])

    def first_samples(self, turn: int, count: int) -> np.ndarray:
        """Some of what was new in a turn, at most so many: a shuffled beginning, so any number of them is a fair choice."""
        return self._offsets[turn] + self._first_seen(turn, np.arange(min(count, self._seen[turn])))

    def _remembered(self, turn: int, places: np.ndarray) -> np.ndarray:
        """Samples of what is kept of all turns before this one, end to end."""
        ends = np.cumsum(self._kept[:turn])
        owner = np.searchsorted(ends, places, side="right")
        found = np.empty_like(places)
        for earlier in np.unique(owner).tolist():
            mine = np.flatnonzero(owner == earlier)
            local = places[mine] - (int(ends[earlier - 1]) if earlier else 0)
            found[mine] = self._offsets[earlier] + self._first_seen(earlier, local)
        return found

    def _first_seen(self, turn: int, places: np.ndarray) -> np.ndarray:
        """Which of its source was the first, second ... new sample of a turn."""
        order = self._orders[turn]
        seed = order.seed if isinstance(order, Shuffled) else order.seeds[0]
        return permute(places, size=self.sizes[turn], seed=seed, epoch=0)

    @cached_property
    def _passes(self) -> tuple[int, ...]:
        """Positions of one pass over each source, with what it repeats of others."""
        if not self.share:
            return self.sizes
        dealt = Mixture((1, 1), (1 - self.share, self.share), seed=0)
        new, _ = dealt.quotas
        rest = [
            -(-size // new) * dealt.block if dealt.block <= EXACT else -(-size * dealt.block // new)
            for size in self.sizes
        ]
        return (self.sizes[0], *rest[1:])

    @cached_property
    def _offsets(self) -> list[int]:
        return list(accumulate(self.sizes[:-1], initial=0))

    @cached_property
    def _planned(self) -> tuple[list[Shuffled | Mixture], list[int]]:
        """The order within each turn, and how many samples of its own each has seen. One after the other, because what a
        turn repeats is what those before it have seen."""
        orders: list[Shuffled | Mixture] = []
        seen: list[int] = []
        for turn, size in enumerate(self.sizes):
            seed, old = derive_seed("turn", self.seed, turn), sum(map(self._bounded, seen))
            is_mixed = self.share > 0 and turn > 0
            order = Mixture((size, old), (1 - self.share, self.share), seed=seed) if is_mixed else Shuffled(size, seed)
            orders.append(order)
            length = self._lengths[turn]
            new = length if isinstance(order, Shuffled) else order.num_drawn(length)[0]
            seen.append(max(1, min(size, new)))
        return orders, seen

    def _bounded(self, seen: int) -> int:
        return seen if self.memory is None else min(seen, self.memory)

    @property
    def _orders(self) -> list[Shuffled | Mixture]:
        return self._planned[0]

    @property
    def _seen(self) -> list[int]:
        return self._planned[1]

    @cached_property
    def _kept(self) -> list[int]:
        return list(map(self._bounded, self._seen))

    @cached_property
    def _epochs_before(self) -> list[int]:
        lengths = zip(self._orders[:-1], self._lengths[:-1], strict=True)
        return list(accumulate((order.num_epochs(length) for order, length in lengths), initial=0))
