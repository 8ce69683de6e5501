"""A stream: each sample is new once, in the order of the data, and between the new ones some come again.

Which position is new, and which sample comes again there, is a function of the position alone, so that ranks, workers and a
restart cannot change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import final

import numpy as np

from bottega.config.recipe import Recipe
from bottega.core.errors import UsageError
from bottega.core.noise import MASK, derive_key, threefry
from bottega.data.order.orders import EXACT, OnlineOrder

FIRST_EPOCH = 0
"""The epoch in which a sample is new. What comes again is in later ones, so that it looks new to augmentation."""


def build_online_stream(recipe: Recipe, length: int) -> OnlineStream:
    """The order of one source. Its batches are those that the recipe says, however many processes share them."""
    online, training = recipe.data.online, recipe.training
    assert online is not None, "the recipe asks for a stream"
    grain = training.batch_size * (training.gradient_accumulation_steps or 1)
    return OnlineStream(length, recipe.seed, replay_fraction=online.replay, memory_size=online.memory, batch_size=grain)


@final
@dataclass(frozen=True)
class OnlineStream(OnlineOrder):
    """`grain` positions in a row are a batch. The first is all new; of each later one the `share` is drawn from the last
    `memory` samples that were new before that batch began, no sample twice, each equally often. When all have been new,
    the rest of the batch is filled up in the same way; that of the very first with what is new in it."""

    length: int
    seed: int
    replay_fraction: float = 0.0
    memory_size: int | None = None
    """None is all of them."""
    batch_size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.replay_fraction < 1, f"{self.replay_fraction} of a batch"
        most = -(-self.batch_size * self._share.numerator // self._share.denominator)
        if self.memory_size is not None and self.memory_size < most:
            raise UsageError(
                f"data.online.memory: {self.memory_size} cannot fill the {most} samples of a batch of {self.batch_size} that replay "
                f"{self.replay_fraction:g} takes from it; give {most} or more"
            )

    @property
    def size(self) -> int:
        return self.length

    @cached_property
    def epoch_length(self) -> int:
        """As many positions as it takes for all samples to have been new."""
        rest, share = self.length - self.batch_size, self._share
        if rest <= 0:
            return self.length
        # Of q positions q - floor(q share) are new; this is the least q that has the rest.
        return self.batch_size + (rest - 1) * share.denominator // (share.denominator - share.numerator) + 1

    @cached_property
    def _share(self) -> Fraction:
        return Fraction(self.replay_fraction).limit_denominator(EXACT)

    def num_new_before(self, positions: np.ndarray) -> np.ndarray:
        """How many samples have been new before each position."""
        later = np.maximum(0, positions - self.batch_size)
        again = later * self._share.numerator // self._share.denominator
        return np.minimum(self.length, positions - again)

    def is_new(self, positions: np.ndarray) -> np.ndarray:
        positions = np.asarray(positions, dtype=np.int64)
        return self.num_new_before(positions + 1) > self.num_new_before(positions)

    def indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        positions = np.asarray(positions, dtype=np.int64)
        before, is_new = self.num_new_before(positions), self.is_new(positions)
        start = positions // self.batch_size * self.batch_size
        begun = self.num_new_before(start)
        # A stream of less than a batch has nothing before it; what fills it up stands in front of it all the same.
        pool = np.where(start == 0, min(self.length, self.batch_size), begun)
        kept = np.maximum(1, pool if self.memory_size is None else np.minimum(pool, self.memory_size))
        # The pool is cut into as many parts as the batch takes from it, and one of each part is drawn.
        taken = np.maximum(1, self.batch_size - (self.num_new_before(start + self.batch_size) - begun))
        turn = np.minimum((positions - start) - (before - begun), taken - 1)
        low, high = turn * kept // taken, (turn + 1) * kept // taken
        words, _ = threefry(derive_key("stream", self.seed), (positions & MASK, positions >> 32))
        drawn = np.maximum(0, pool - kept) + low + (words * np.maximum(1, high - low) >> 32)
        return np.where(is_new, before, drawn), np.where(is_new, FIRST_EPOCH, 1 + positions // self.batch_size)

    def num_epochs(self, positions: int) -> int:
        return 1 + -(-positions // self.batch_size)
