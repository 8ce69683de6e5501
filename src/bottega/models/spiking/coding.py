"""Rate and latency coding: encode values as spike trains and decode them.

S time steps   B batch   ... the shape of an example. Values are in 0..1; values outside are clamped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bottega.core.noise import Noise

INVERSE_GOLDEN_RATIO = 0.6180339887498949
"""Its multiples modulo 1 are spread evenly (a low-discrepancy sequence)."""


def constant_code(x: Tensor, steps: int) -> Tensor:
    """Return the value itself in every step, (S, B, ...): a current rather than spikes. It is a view without a copy."""
    return x.expand(steps, *x.shape)


def rate_code(x: Tensor, steps: int, noise: Noise | None = None, *, name: str = "rate_code") -> Tensor:
    """Return spikes (S, B, ...) that occur in each step with probability x.

    Draws depend on an example's index in the global batch, so any split of the batch gives the same spikes. Without noise
    the spikes are spread evenly, and their rate is within 1 / S of x.
    """
    if noise is None:
        return _fire_above(x, even_thresholds(steps, x).view(steps, *(1,) * x.ndim))
    return rate_code_from_draws(x, noise.uniform(name, (steps, *x.shape[1:])))


def rate_code_from_draws(x: Tensor, draws: Tensor) -> Tensor:
    """Return the spikes of `rate_code` from given uniform draws (B, S, ...)."""
    return _fire_above(x, draws.movedim(1, 0))


def even_thresholds(steps: int, like: Tensor) -> Tensor:
    """Return the midpoints of S equal parts of (0, 1), (S,), in an order in which neighbours are far apart."""
    sequence = torch.arange(1, steps + 1, device=like.device, dtype=torch.float64) * INVERSE_GOLDEN_RATIO % 1
    ranks = sequence.argsort().argsort()
    return ((ranks + 0.5) / steps).to(like.dtype)


def decode_rate(spikes: Tensor) -> Tensor:
    """Return the fraction of steps with a spike, (B, ...)."""
    return spikes.sum(0) / len(spikes)


def latency_code(x: Tensor, steps: int) -> Tensor:
    """Return one spike per value, (S, B, ...): in the first step for 1, and later for lower values.

    Values below half of 1 / S, whose spike would come after the last step, have none.
    """
    spike_step = torch.round((1 - x.clamp(0, 1)) * steps)  # 0..S, where S means no spike
    times = torch.arange(steps, device=x.device, dtype=x.dtype).view(steps, *(1,) * x.ndim)
    return (times == spike_step).to(x.dtype)


def decode_latency(spikes: Tensor) -> Tensor:
    """Return values (B, ...) from the time of the first spike; 0 if there is none."""
    steps = len(spikes)
    remaining_steps = torch.arange(steps, 0, -1, device=spikes.device, dtype=spikes.dtype).view(
        steps, *(1,) * (spikes.ndim - 1)
    )
    return (remaining_steps * (spikes > 0)).amax(0) / steps


def _fire_above(x: Tensor, thresholds: Tensor) -> Tensor:
    return (thresholds < x).to(x.dtype)
