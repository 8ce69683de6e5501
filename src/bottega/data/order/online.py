"""Online learning: one pass over the data in its own order, with replay of earlier samples in between.

Which positions show a new sample, and which samples are replayed at the other positions, is a pure function of the
position, so that ranks, workers and restarts cannot change it.
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
from bottega.data.order.orders import MAX_EXACT_SLOTS, OnlineOrder

NEW_SAMPLE_EPOCH = 0
"""Epoch of new samples. Replayed samples have later epochs, so that they are augmented differently."""


def build_online_stream(recipe: Recipe, length: int) -> OnlineStream:
    """Return the order of a source of `length` samples; its batch size is the global one, over all processes."""
    online, training = recipe.data.online, recipe.training
    assert online is not None, "data.online must be set"
    batch_size = training.batch_size * (training.gradient_accumulation_steps or 1)
    return OnlineStream(
        length, recipe.seed, replay_fraction=online.replay, memory_size=online.memory, batch_size=batch_size
    )


@final
@dataclass(frozen=True)
class OnlineStream(OnlineOrder):
    """One pass over the samples in batches, each after the first with a fraction of replayed samples.

    Replayed samples are drawn uniformly without repetition from the last `memory_size` samples that were new before the
    batch. After all samples have been new, batches consist of replayed samples only. If the data is shorter than the first batch,
    that batch is filled by repeating its own samples.
    """

    length: int
    seed: int
    replay_fraction: float = 0.0
    memory_size: int | None = None
    """None keeps all samples."""
    batch_size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.replay_fraction < 1, f"replay_fraction must be in [0, 1), got {self.replay_fraction}"
        min_memory_size = -(-self.batch_size * self._replay.numerator // self._replay.denominator)
        if self.memory_size is not None and self.memory_size < min_memory_size:
            raise UsageError(
                f"data.online.memory={self.memory_size} is too small: with data.online.replay={self.replay_fraction:g} a batch of "
                f"{self.batch_size} replays {min_memory_size} samples; set it to {min_memory_size} or more"
            )

    @property
    def size(self) -> int:
        return self.length

    @cached_property
    def epoch_length(self) -> int:
        """Number of positions until all samples have been new."""
        num_remaining, fraction = self.length - self.batch_size, self._replay
        if num_remaining <= 0:
            return self.length
        # q positions show q - floor(q * fraction) new samples; this is the least q that shows all remaining samples.
        return (
            self.batch_size
            + (num_remaining - 1) * fraction.denominator // (fraction.denominator - fraction.numerator)
            + 1
        )

    @cached_property
    def _replay(self) -> Fraction:
        return Fraction(self.replay_fraction).limit_denominator(MAX_EXACT_SLOTS)

    def num_new_before(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of samples that were new before each position."""
        after_first_batch = np.maximum(0, positions - self.batch_size)
        num_replayed = after_first_batch * self._replay.numerator // self._replay.denominator
        return np.minimum(self.length, positions - num_replayed)

    def is_new(self, positions: np.ndarray) -> np.ndarray:
        positions = np.asarray(positions, dtype=np.int64)
        return self.num_new_before(positions + 1) > self.num_new_before(positions)

    def indices(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        positions = np.asarray(positions, dtype=np.int64)
        num_new, is_new = self.num_new_before(positions), self.is_new(positions)
        start = positions // self.batch_size * self.batch_size
        new_before_batch = self.num_new_before(start)
        # A stream shorter than a batch has no earlier samples, so its first batch is filled with its own samples.
        pool_size = np.where(start == 0, min(self.length, self.batch_size), new_before_batch)
        memory_size = np.maximum(1, pool_size if self.memory_size is None else np.minimum(pool_size, self.memory_size))
        # The pool is divided into as many strata as the batch has replayed samples; one sample is drawn from each.
        num_replayed = np.maximum(
            1, self.batch_size - (self.num_new_before(start + self.batch_size) - new_before_batch)
        )
        stratum = np.minimum((positions - start) - (num_new - new_before_batch), num_replayed - 1)
        low, high = stratum * memory_size // num_replayed, (stratum + 1) * memory_size // num_replayed
        random_words, _ = threefry(derive_key("stream", self.seed), (positions & MASK, positions >> 32))
        replayed = np.maximum(0, pool_size - memory_size) + low + (random_words * np.maximum(1, high - low) >> 32)
        return np.where(is_new, num_new, replayed), np.where(is_new, NEW_SAMPLE_EPOCH, 1 + positions // self.batch_size)

    def num_epochs(self, num_positions: int) -> int:
        return 1 + -(-num_positions // self.batch_size)
