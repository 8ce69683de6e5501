"""The three noise schedules of diffusers' DDPMScheduler, over 1,000 steps as in DDPM."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

NUM_TRAIN_TIMESTEPS = 1000
"""Number of steps of a schedule, as in diffusers; for every objective the model's time input is on a scale from 0 to this."""
Schedule = Literal["cosine", "linear", "scaled_linear"]
DIFFUSERS_SCHEDULES: dict[Schedule, tuple[str, float, float]] = {
    "linear": ("linear", 1e-4, 0.02),
    "scaled_linear": ("scaled_linear", 0.00085, 0.012),
    "cosine": ("squaredcos_cap_v2", 1e-4, 0.02),
}
"""Schedule -> diffusers' beta_schedule, beta_start and beta_end; the cosine schedule ignores both numbers."""


def betas(schedule: Schedule) -> Tensor:
    """Return the variance of the noise added in each step, float64 (NUM_TRAIN_TIMESTEPS,)."""
    if schedule == "linear":
        return torch.linspace(1e-4, 0.02, NUM_TRAIN_TIMESTEPS, dtype=torch.float64)
    if schedule == "scaled_linear":
        return torch.linspace(0.00085**0.5, 0.012**0.5, NUM_TRAIN_TIMESTEPS, dtype=torch.float64).square()
    t = torch.arange(NUM_TRAIN_TIMESTEPS + 1, dtype=torch.float64) / NUM_TRAIN_TIMESTEPS
    alpha_bars = torch.cos((t + 0.008) / 1.008 * math.pi / 2).square()
    return (1 - alpha_bars[1:] / alpha_bars[:-1]).clamp(max=0.999)


@lru_cache(maxsize=16)
def alpha_bar(schedule: Schedule, device: torch.device) -> Tensor:
    """Return the fraction of variance that is data after each step, (NUM_TRAIN_TIMESTEPS,).

    Cached on the device: copying it at each training step would make the host wait for the device.
    """
    return torch.cumprod(1 - betas(schedule), 0).to(device)
