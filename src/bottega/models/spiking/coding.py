"""Encodes values as spike trains and decodes them: rate and latency coding.

S time steps   B batch   ... the shape of an example. Values are in 0..1; values outside are clamped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bottega.core.noise import Noise

GOLDEN = 0.6180339887498949


def constant_code(x: Tensor, steps: int) -> Tensor:
    """[S, B, ...]: the value itself in every step, as a current and not as spikes. It takes no memory."""
    return x.expand(steps, *x.shape)


def rate_code(x: Tensor, steps: int, noise: Noise | None = None, *, name: str = "rate_code") -> Tensor:
    """Spikes [S, B, ...], in each step with the chance x: the draws are those of each example's place in the global batch,
    so any split gives the same. Without noise the spikes are spread evenly, and their share is within 1 / S of x.
    """
    if noise is None:
        return _below(x, even_thresholds(steps, x).view(steps, *(1,) * x.ndim))
    return rate_code_from_draws(x, noise.uniform(name, (steps, *x.shape[1:])))


def rate_code_from_draws(x: Tensor, draws: Tensor) -> Tensor:
    """The same from uniform draws [B, S, ...] that were made before."""
    return _below(x, draws.movedim(1, 0))


def even_thresholds(steps: int, like: Tensor) -> Tensor:
    """[S]: the middles of S equal parts of (0, 1), each once, in an order in which neighbours are far apart."""
    order = torch.arange(1, steps + 1, device=like.device, dtype=torch.float64) * GOLDEN % 1
    return ((order.argsort().argsort() + 0.5) / steps).to(like.dtype)


def decode_rate(spikes: Tensor) -> Tensor:
    """[B, ...]: the share of the steps that have a spike."""
    return spikes.sum(0) / len(spikes)


def latency_code(x: Tensor, steps: int) -> Tensor:
    """One spike [S, B, ...]: of 1 in the first step, later the lower the value, and none of 0. What would come after the
    last step (values below half of 1 / S) does not come."""
    first = torch.round((1 - x.clamp(0, 1)) * steps)  # 0..S, where S is never
    times = torch.arange(steps, device=x.device, dtype=x.dtype).view(steps, *(1,) * x.ndim)
    return (times == first).to(x.dtype)


def decode_latency(spikes: Tensor) -> Tensor:
    """[B, ...]: from the first spike of a train; 0 where there is none."""
    steps = len(spikes)
    left = torch.arange(steps, 0, -1, device=spikes.device, dtype=spikes.dtype).view(steps, *(1,) * (spikes.ndim - 1))
    return (left * (spikes > 0)).amax(0) / steps


def _below(x: Tensor, thresholds: Tensor) -> Tensor:
    return (thresholds < x).to(x.dtype)
