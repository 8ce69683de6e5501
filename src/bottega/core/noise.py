"""Counter-based random numbers: Threefry-2x32 (Salmon et al., 2011) keyed by seed, step, position and name.

The cipher uses only `+ ^ << >> & |`, so the same code runs on numpy, torch and JAX integers and agrees bit for bit. The
draws of an example depend on its position in the global batch, never on how the batch is split.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

MASK = 0xFFFFFFFF
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)


def threefry(key: tuple[Any, Any], counter: tuple[Any, Any], *, mask: Any = MASK) -> tuple[Any, Any]:
    """Apply twenty rounds of Threefry-2x32 to 64-bit integers that hold 32-bit words, or to uint32 with a mask of that type."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + keys[0]) & mask, (counter[1] + keys[1]) & mask
    for i in range(20):
        r = ROTATIONS[i % 8]
        x = (x + y) & mask
        y = (((y << r) | (y >> (32 - r))) & mask) ^ x
        if i % 4 == 3:
            j = i // 4 + 1
            x, y = (x + keys[j % 3]) & mask, (y + keys[(j + 1) % 3] + j) & mask
    return x, y


def derive_key(*parts: object) -> tuple[int, int]:
    """Return two 32-bit words that are a hash of `parts`, each of which must have a stable text form."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed for another generator (torch's dropout, numpy's Philox)."""
    low, high = derive_key(*parts)
    return (high & 0x7FFFFFFF) << 32 | low


def numpy_generator(*parts: object) -> np.random.Generator:
    """Return a numpy generator that is a function of `parts`; initial weights use (seed, parameter name)."""
    return np.random.Generator(np.random.Philox(derive_seed(*parts)))


@dataclass(frozen=True)
class Noise:
    """Random numbers for the examples at `positions` of the global batch of one step.

    `xp` is the array module of the positions, numpy or torch; `arange`, `log`, `cos` and `sqrt` are the same in both.
    """

    seed: int
    step: int
    positions: Any
    xp: Any = np

    framework: ClassVar[str] = "torch"
    """The framework whose models take these draws; those of torch take draws of numpy too."""

    def uniform(self, name: str, shape: tuple[int, ...] = ()) -> Any:
        """Return uniform numbers in (0, 1), float32, `(examples, *shape)`."""
        return self._reshape(self.to_uniform(self.bits(name, math.prod(shape))), shape)

    def normal(self, name: str, shape: tuple[int, ...] = ()) -> Any:
        """Return standard normal numbers by Box-Muller, float32, `(examples, *shape)`."""
        return self._reshape(self.to_normal(self.bits(name, math.prod(shape))), shape)

    def bits(self, name: str, count: int) -> tuple[Any, Any]:
        """Return two random 32-bit words for each example and draw, `(examples, count)` each."""
        return self.random_words(derive_key(self.seed, self.step, name), count)

    def random_words(self, key: tuple[Any, Any], count: int) -> tuple[Any, Any]:
        """Return two arrays of random 32-bit words, `(examples, count)` each, that are a function of `key` and the positions."""
        device = {} if self.xp is np else {"device": self.positions.device}
        draws = self.xp.arange(count, dtype=self.xp.int64, **device)
        return threefry(key, (self.positions[:, None] + 0 * draws, draws[None, :]))

    def to_uniform(self, words: tuple[Any, Any]) -> Any:
        """Return uniform values in (0, 1) from the first of two arrays of random words."""
        return self._to_unit_interval(words[0])

    def to_normal(self, words: tuple[Any, Any]) -> Any:
        """Return standard normal values from two arrays of random words, by Box-Muller."""
        radius = self.xp.sqrt(-2 * self.xp.log(self._to_unit_interval(words[0])))
        return radius * self.xp.cos(2 * math.pi * self._to_unit_interval(words[1]))

    def _to_unit_interval(self, words: Any) -> Any:
        # The top 23 bits plus a half: every value is exact in float32 and neither 0 nor 1 can occur.
        scaled = (words >> 9).astype(np.float32) if self.xp is np else (words >> 9).to(self.xp.float32)
        return (scaled + 0.5) * (1.0 / (1 << 23))

    def _reshape(self, values: Any, shape: tuple[int, ...]) -> Any:
        return values.reshape((len(self.positions), *shape))
