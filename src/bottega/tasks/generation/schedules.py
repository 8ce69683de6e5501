"""The three noise schedules of diffusers' DDPMScheduler, over 1,000 steps as in DDPM."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from bottega.core.types import Array
from bottega.tasks.generation.arrays import get_namespace

NUM_TRAIN_TIMESTEPS = 1000
"""Number of steps of a schedule, as in diffusers; for every objective the model's time input is on a scale from 0 to this."""
Schedule = Literal["cosine", "linear", "scaled_linear"]
DIFFUSERS_SCHEDULES: dict[Schedule, tuple[str, float, float]] = {
    "linear": ("linear", 1e-4, 0.02),
    "scaled_linear": ("scaled_linear", 0.00085, 0.012),
    "cosine": ("squaredcos_cap_v2", 1e-4, 0.02),
}
"""Schedule -> diffusers' beta_schedule, beta_start and beta_end; the cosine schedule ignores both numbers."""


def betas(schedule: Schedule) -> np.ndarray:
    """Return the variance of the noise added in each step, float64 (NUM_TRAIN_TIMESTEPS,)."""
    if schedule == "linear":
        return np.linspace(1e-4, 0.02, NUM_TRAIN_TIMESTEPS)
    if schedule == "scaled_linear":
        return np.square(np.linspace(0.00085**0.5, 0.012**0.5, NUM_TRAIN_TIMESTEPS))
    t = np.arange(NUM_TRAIN_TIMESTEPS + 1, dtype=np.float64) / NUM_TRAIN_TIMESTEPS
    alpha_bars = np.square(np.cos((t + 0.008) / 1.008 * math.pi / 2))
    return np.minimum(1 - alpha_bars[1:] / alpha_bars[:-1], 0.999)


@lru_cache(maxsize=8)
def compute_levels(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Return alpha and sigma after each step, float64 (NUM_TRAIN_TIMESTEPS,); alpha^2 is the fraction of variance that is data."""
    alpha_bars = np.cumprod(1 - betas(schedule))
    return np.sqrt(alpha_bars), np.sqrt(1 - alpha_bars)


def get_levels(schedule: Schedule, like: Array) -> tuple[Array, Array]:
    """Return the tables of `compute_levels` as arrays like `like`: of its framework, on its device."""
    xp = get_namespace(like)
    if xp.__name__ == "torch":
        return _copy_levels(schedule, like.device)
    alphas, sigmas = compute_levels(schedule)
    return xp.asarray(alphas), xp.asarray(sigmas)


@lru_cache(maxsize=16)
def _copy_levels(schedule: Schedule, device: Any) -> tuple[Array, Array]:
    """Return the tables on a device of torch, cached: copying them at each training step would make the host wait."""
    import torch

    alphas, sigmas = (torch.from_numpy(table).to(device) for table in compute_levels(schedule))
    return alphas, sigmas
