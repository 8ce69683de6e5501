"""Online learning: one pass over the data in its own order, with replay of earlier samples in between.

Which positions are new, and which samples are replayed at the others, is a pure function of the position, so that ranks,
workers and restarts cannot change it.
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
"""Epoch of new samples. Replayed ones have later epochs, so that they are augmented differently."""


def build_online_stream(recipe: Recipe, length: int) -> OnlineStream:
    """Return the order of a source of `length` samples; its batch size is the recipe's, whatever the number of processes."""
    online, training = recipe.data.online, recipe.training
    assert online is not None, "data.online is set"
    batch_size = training.batch_size * (training.gradient_accumulation_steps or 1)
    return OnlineStream(
        length, recipe.seed, replay_fraction=online.replay, memory_size=online.memory, batch_size=batch_size
    )


@final
@dataclass(frozen=True)
class OnlineStream(OnlineOrder):
    """One pass over the samples in batches, each after the first with a fraction of replayed samples.

    Replayed samples are drawn uniformly without repetition from the last `memory_size` samples that were new before the
    batch. Once all samples have been new, the batch is filled with replayed ones; the first batch with its own.
    """

    length: int
    seed: int
    replay_fraction: float = 0.0
    memory_size: int | None = None
    """None keeps all samples."""
    batch_size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.replay_fraction < 1, f"{self.replay_fraction} of a batch"
        needed = -(-self.batch_size * self._replay.numerator // self._replay.denominator)
        if self.memory_size is not None and self.memory_size < needed:
            raise UsageError(
                f"data.online.memory={self.memory_size} is too small: with data.online.replay={self.replay_fraction:g} a batch of "
                f"{self.batch_size} replays {needed} samples; set it to {needed} or more"
            )

    @property
    def size(self) -> int:
        return self.length

    @cached_property
    def epoch_length(self) -> int:
        """Number of positions until all samples have been new."""
        rest, fraction = self.length - self.batch_size, self._replay
        if rest <= 0:
            return self.length
        # Of q positions q - floor(q * fraction) are new; this is the least q that covers the rest.
        return self.batch_size + (rest - 1) * fraction.denominator // (fraction.denominator - fraction.numerator) + 1

    @cached_property
    def _replay(self) -> Fraction:
        return Fraction(self.replay_fraction).limit_denominator(EXACT)

    def num_new_before(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of samples that were new before each position."""
        later = np.maximum(0, positions - self.batch_size)
        replayed = later * self._replay.numerator // self._replay.denominator
        return np.minimum(self.length, positions - replayed)

    def is_new(self, positions: np.ndarray) -> np.ndarray:
        positions = np.asarray(positions, dtype=np.int64)
        return self.num_new_before(positions + 1) > self.num_new_before(positions)

    def indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        positions = np.asarray(positions, dtype=np.int64)
        before, is_new = self.num_new_before(positions), self.is_new(positions)
        start = positions // self.batch_size * self.batch_size
        new_before_batch = self.num_new_before(start)
        # A stream shorter than a batch has no earlier samples, so its first batch is filled with its own.
        pool = np.where(start == 0, min(self.length, self.batch_size), new_before_batch)
        memory = np.maximum(1, pool if self.memory_size is None else np.minimum(pool, self.memory_size))
        # The pool is divided into as many strata as the batch has replayed samples; one is drawn from each.
        num_replayed = np.maximum(
            1, self.batch_size - (self.num_new_before(start + self.batch_size) - new_before_batch)
        )
        stratum = np.minimum((positions - start) - (before - new_before_batch), num_replayed - 1)
        low, high = stratum * memory // num_replayed, (stratum + 1) * memory // num_replayed
        words, _ = threefry(derive_key("stream", self.seed), (positions & MASK, positions >> 32))
        drawn = np.maximum(0, pool - memory) + low + (words * np.maximum(1, high - low) >> 32)
        return np.where(is_new, before, drawn), np.where(is_new, FIRST_EPOCH, 1 + positions // self.batch_size)

    def num_epochs(self, positions: int) -> int:
        return 1 + -(-positions // self.batch_size)
