"""Randomness as a function: Threefry-2x32 (Salmon et al., 2011) keyed by seed, step, position and name.

The cipher uses `+ ^ << >> & |` alone, so the same lines run on numpy and torch integers and agree bit for bit. What is
drawn for an example depends on its position in the global batch, never on how the batch was split.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

MASK = 0xFFFFFFFF
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)


def threefry(key: tuple[Any, Any], counter: tuple[Any, Any]) -> tuple[Any, Any]:
    """Twenty rounds of Threefry-2x32 on 64-bit integers that hold 32-bit words."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + keys[0]) & MASK, (counter[1] + keys[1]) & MASK
    for i in range(20):
        r = ROTATIONS[i % 8]
        x = (x + y) & MASK
        y = (((y << r) | (y >> (32 - r))) & MASK) ^ x
        if i % 4 == 3:
            j = i // 4 + 1
            x, y = (x + keys[j % 3]) & MASK, (y + keys[(j + 1) % 3] + j) & MASK
    return x, y


def derive_key(*parts: object) -> tuple[int, int]:
    """Two 32-bit words from anything with a stable text form."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def derive_seed(*parts: object) -> int:
    """A 63-bit seed for a generator that is not ours (dropout masks, numpy's Philox)."""
    low, high = derive_key(*parts)
    return (high & 0x7FFFFFFF) << 32 | low


def numpy_generator(*parts: object) -> np.random.Generator:
    """A numpy generator that is f(parts); initial weights are generator(seed, parameter name)."""
    return np.random.Generator(np.random.Philox(derive_seed(*parts)))


@dataclass(frozen=True)
class Noise:
    """Noise for the examples at `positions` of the global batch of one step.

    `xp` is the array module the positions live in (numpy or torch); both spell arange, log, cos and sqrt alike.
    """

    seed: int
    step: int
    positions: Any
    xp: Any = np

    def uniform(self, name: str, shape: tuple[int, ...] = ()) -> Any:
        """In (0, 1), float32, shape [examples, *shape]."""
        return self._shaped(self.to_uniform(self.bits(name, math.prod(shape))), shape)

    def normal(self, name: str, shape: tuple[int, ...] = ()) -> Any:
        """Standard normal by Box-Muller, float32, shape [examples, *shape]."""
        return self._shaped(self.to_normal(self.bits(name, math.prod(shape))), shape)

    def bits(self, name: str, count: int) -> tuple[Any, Any]:
        """Two words for each example and each of `count` draws: shapes [examples, count]."""
        return self.random_words(derive_key(self.seed, self.step, name), count)

    def random_words(self, key: tuple[Any, Any], count: int) -> tuple[Any, Any]:
        device = {} if self.xp is np else {"device": self.positions.device}
        draws = self.xp.arange(count, dtype=self.xp.int64, **device)
        return threefry(key, (self.positions[:, None] + 0 * draws, draws[None, :]))

    def to_uniform(self, words: tuple[Any, Any]) -> Any:
        return self._unit(words[0])

    def to_normal(self, words: tuple[Any, Any]) -> Any:
        radius = self.xp.sqrt(-2 * self.xp.log(self._unit(words[0])))
        return radius * self.xp.cos(2 * math.pi * self._unit(words[1]))

    def _unit(self, words: Any) -> Any:
        # The top 23 bits and a half: every value is exact in float32 and neither 0 nor 1 can occur.
        scaled = (words >> 9).astype(np.float32) if self.xp is np else (words >> 9).to(self.xp.float32)
        return (scaled + 0.5) * (1.0 / (1 << 23))

    def _shaped(self, values: Any, shape: tuple[int, ...]) -> Any:
        return values.reshape((len(self.positions), *shape))
