"""`Noise` on a GPU with one compiled kernel per draw: 130 small kernels cost the host 2 ms, more than a block of a model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bottega.core.noise import Noise, derive_key


def make_noise(seed: int, step: int, positions: Tensor, *, fused: bool) -> Noise:
    """Return the noise of a step, compiled if `fused`."""
    return (FusedNoise if fused else Noise)(seed, step, positions, torch)


@dataclass(frozen=True)
class FusedNoise(Noise):
    """Draws from the same random words as `Noise`; the values agree to the last bit or two of a float32."""

    def uniform(self, name: str, shape: tuple[int, ...] = ()) -> Any:
        return self._draw("uniform", name, shape)

    def normal(self, name: str, shape: tuple[int, ...] = ()) -> Any:
        return self._draw("normal", name, shape)

    def _draw(self, distribution: str, name: str, shape: tuple[int, ...]) -> Tensor:
        # Passed as device tensors: an integer that changes every step would be recompiled, and the compiler treats a
        # symbolic integer as a float.
        key_0, key_1 = (
            torch.full((), word, dtype=torch.int64, device=self.positions.device)
            for word in derive_key(self.seed, self.step, name)
        )
        count = math.prod(shape)
        values = _compile_draw(distribution, len(self.positions), count)(key_0, key_1, self.positions)
        return self._reshape(values, shape)


@functools.cache
def _compile_draw(distribution: str, num_rows: int, count: int) -> Callable[..., Tensor]:
    """Return a separate function for each shape: the compiler gives up on one function after eight shapes."""

    def draw(key_0: Tensor, key_1: Tensor, positions: Tensor) -> Tensor:
        rng = Noise(0, 0, positions, torch)
        words = rng.random_words((key_0, key_1), count)
        return rng.to_normal(words) if distribution == "normal" else rng.to_uniform(words)

    # The limit counts code objects, so each function needs its own.
    draw.__code__ = draw.__code__.replace(co_name=f"{distribution}_{num_rows}_{count}")
    return torch.compile(draw, dynamic=False)


def forget_compiled_draws() -> None:
    """Compile each draw again at its next use; for a block in which torch.compile is replaced."""
    _compile_draw.cache_clear()
