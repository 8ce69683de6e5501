"""`Noise` in JAX: the same random words as in torch and numpy, from 32-bit integers, with keys that are arguments.

The key of a draw is a hash of seed, step and name, which only the host can compute. Inside a jitted function it would become a
constant, so the keys of a step are computed before and passed in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from bottega.core.noise import MASK, Noise, derive_key, threefry


def derive_noise_keys(seed: int, step: int, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the key of each draw of a step, two words of type uint32, by name."""
    return {name: np.array(derive_key(seed, step, name), np.uint32) for name in names}


@dataclass(frozen=True)
class JaxNoise(Noise):
    """Random numbers for the examples at `positions` (uint32), with the keys of all names that are drawn."""

    framework: ClassVar[str] = "jax"
    xp: Any = jnp
    keys: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_step(cls, seed: int, step: int, positions: Any, names: Sequence[str]) -> JaxNoise:
        """Return the noise of one step, outside of a jitted function."""
        return cls(seed, step, jnp.asarray(positions, jnp.uint32), keys=derive_noise_keys(seed, step, names))

    def bits(self, name: str, count: int) -> tuple[Any, Any]:
        assert name in self.keys, f"noise_names of the task lacks {name}"
        key = self.keys[name]
        return self.random_words((key[0], key[1]), count)

    def random_words(self, key: tuple[Any, Any], count: int) -> tuple[Any, Any]:
        draws = jnp.arange(count, dtype=jnp.uint32)
        positions = self.positions.astype(jnp.uint32)
        return threefry(key, (positions[:, None] + 0 * draws, draws[None, :]), mask=np.uint32(MASK))

    def to_normal(self, words: tuple[Any, Any]) -> Any:
        radius = jnp.sqrt(-2 * jnp.log(self._to_unit_interval(words[0])))
        return radius * jnp.cos(np.float32(2 * math.pi) * self._to_unit_interval(words[1]))

    def _to_unit_interval(self, words: Any) -> Any:
        return ((words >> 9).astype(jnp.float32) + 0.5) * np.float32(1.0 / (1 << 23))
