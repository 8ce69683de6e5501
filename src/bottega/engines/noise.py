"""The draws of `Noise` on a GPU, each as one kernel: 130 small ones cost the host 2 ms, more than a block of a model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bottega.core.noise import Noise, key_of


def draw(seed: int, step: int, positions: Tensor, *, fused: bool) -> Noise:
    return (FusedNoise if fused else Noise)(seed, step, positions, torch)


@dataclass(frozen=True)
class FusedNoise(Noise):
    """The same words as `Noise` has; what they become agrees to the last bit or two of a float32."""

    def uniform(self, name: str, shape: tuple[int, ...] = ()) -> Any:
        return self._fused("uniform", name, shape)

    def normal(self, name: str, shape: tuple[int, ...] = ()) -> Any:
        return self._fused("normal", name, shape)

    def _fused(self, kind: str, name: str, shape: tuple[int, ...]) -> Tensor:
        # As tensors, written by the device: an integer that changes with every step would be compiled anew, and the
        # compiler takes a symbol for a float.
        first, second = (
            torch.full((), word, dtype=torch.int64, device=self.positions.device)
            for word in key_of(self.seed, self.step, name)
        )
        return self._shaped(_compiled()(kind, first, second, self.positions, math.prod(shape)), shape)


def _values(kind: str, first: Tensor, second: Tensor, positions: Tensor, count: int) -> Tensor:
    rng = Noise(0, 0, positions, torch)
    words = rng.words((first, second), count)
    return rng.normal_of(words) if kind == "normal" else rng.uniform_of(words)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_values, dynamic=False)
