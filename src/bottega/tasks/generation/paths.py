"""Paths between data and noise: noise levels, prediction targets and training times.

Tasks hold a `NoisePath` and exports store it; what differs between objectives is in objectives/, one file each. Arrays are
those of numpy, torch or JAX.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from bottega.core.noise import Noise
from bottega.core.types import Array
from bottega.tasks.generation.objectives import ObjectiveName, find_objective
from bottega.tasks.generation.objectives.base import Objective, Times
from bottega.tasks.generation.schedules import Schedule, betas


class NoisePath(BaseModel):
    """A path from data to noise: x = alpha * clean + sigma * noise.

    `flow` is the straight line (rectified flow); `noise` and `v` preserve the variance (DDPM; Salimans and Ho, 2022).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    objective: ObjectiveName = "flow"
    times: Times = "logit_normal"
    schedule: Schedule = "cosine"
    min_snr: float | None = None
    shift: float = 1.0
    """flow: above 1, training and sampler spend more time at high noise, which large and redundant samples such as video need
    (Esser et al., 2024: the square root of the ratio of their sizes)."""

    @property
    def _objective(self) -> Objective:
        return _build_objective(self.objective, self.times, self.schedule, self.min_snr, self.shift)

    def draw_times(self, rng: Noise) -> Array:
        """Return training times (batch,) in (0, 1)."""
        return self._objective.draw_times(rng)

    def levels(self, t: Array) -> tuple[Array, Array]:
        """Return alpha and sigma in the shape of t."""
        return self._objective.levels(t)

    def model_time(self, t: Array) -> Array:
        """Return t as the model's time input, on a scale from 0 to 1,000."""
        return self._objective.model_time(t)

    def target(self, clean: Array, noise: Array, alpha: Array, sigma: Array) -> Array:
        """Return the prediction target; alpha and sigma broadcast against a sample."""
        return self._objective.target(clean, noise, alpha, sigma)

    def split_prediction(self, predicted: Array, x: Array, alpha: Array, sigma: Array) -> tuple[Array, Array]:
        """Return the (clean, noise) that a prediction for the noisy sample x implies."""
        return self._objective.split_prediction(predicted, x, alpha, sigma)

    def weight(self, alpha: Array, sigma: Array) -> Array | None:
        """Return the loss weight of each sample (batch,), or None if all weights are 1."""
        return self._objective.weight(alpha, sigma)

    def error(self, predicted: Array, clean: Array, noise: Array, alpha: Array, sigma: Array) -> Array:
        """Return the weighted mean squared error of each sample (batch,)."""
        return self._objective.error(predicted, clean, noise, alpha, sigma)

    @property
    def max_steps(self) -> int | None:
        """Largest number of sampler steps, beyond which two would fall on the same time; None: no limit."""
        return self._objective.max_steps

    def grid(self, steps: int) -> np.ndarray:
        """Return the times of a sampler from noise to data, float64 (steps + 1,)."""
        return self._objective.grid(steps)

    def grid_levels(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return alpha and sigma along a grid of times; sigma is 0 at its end."""
        return self._objective.grid_levels(t)

    def betas(self) -> np.ndarray:
        """Return the betas of the schedule, float64 (NUM_TRAIN_TIMESTEPS,)."""
        return betas(self.schedule)

    @property
    def uses_schedule(self) -> bool:
        """Whether the objective uses `schedule` and `min_snr`."""
        return self._objective.uses_schedule

    @property
    def has_stock_pipeline(self) -> bool:
        """Whether the latent pipelines of diffusers can sample this objective."""
        return self._objective.has_stock_pipeline

    def scheduler(self, pipeline: str | None) -> tuple[str, dict[str, Any]]:
        """Return (class, configuration) of the diffusers scheduler with the same path, in the form that `pipeline` needs."""
        return self._objective.scheduler(pipeline)


# Not a cached_property of the path: model_copy with another value would keep the objective of the original.
@lru_cache(maxsize=64)
def _build_objective(name: str, times: Times, schedule: Schedule, min_snr: float | None, shift: float) -> Objective:
    return find_objective(name)(times=times, schedule=schedule, min_snr=min_snr, shift=shift)
