"""From data to noise and back: the path between them, what a model predicts on it, and when it is asked.

`Path` is what tasks hold and exports store; what differs between objectives stands in objectives/, one file each.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from bottega.core.noise import Noise
from bottega.tasks.generation.objectives import ObjectiveName, find_objective
from bottega.tasks.generation.objectives.base import Objective, Times
from bottega.tasks.generation.schedules import Schedule, betas


class NoisePath(BaseModel):
    """`flow` is the straight line (rectified flow); `noise` and `v` keep the variance (DDPM, Salimans and Ho)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    objective: ObjectiveName = "flow"
    times: Times = "logit_normal"
    schedule: Schedule = "cosine"
    min_snr: float | None = None
    shift: float = 1.0
    """flow: above 1, training and sampler look more at times with much noise. A sample that says everything many times
    over, as a film does, can be told from stronger noise (Esser et al., 2024: by the square root of how many times)."""

    @property
    def _rule(self) -> Objective:
        return _objective(self.objective, self.times, self.schedule, self.min_snr, self.shift)

    def draw_times(self, rng: Noise) -> Tensor:
        """When training looks, [B] in (0, 1)."""
        return self._rule.draw_times(rng)

    def levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """alpha and sigma, as shaped as t."""
        return self._rule.levels(t)

    def model_time(self, t: Tensor) -> Tensor:
        """t as a model is told it."""
        return self._rule.model_time(t)

    def target(self, clean: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """What the model should predict; the levels are shaped to multiply a sample."""
        return self._rule.target(clean, noise, alpha, sigma)

    def split_prediction(self, predicted: Tensor, x: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """(clean, noise) that a prediction at x stands for."""
        return self._rule.split_prediction(predicted, x, alpha, sigma)

    def weight(self, alpha: Tensor, sigma: Tensor) -> Tensor | None:
        """How much each sample counts, [B]; None is all alike."""
        return self._rule.weight(alpha, sigma)

    def error(self, predicted: Tensor, clean: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Of each sample [B]: the mean square of what is wrong, by its weight."""
        return self._rule.error(predicted, clean, noise, alpha, sigma)

    @property
    def max_steps(self) -> int | None:
        """A sampler can take no more, because two of them would be the same; None is any number."""
        return self._rule.max_steps

    def grid(self, steps: int, device: torch.device | str) -> Tensor:
        """The times a sampler visits, from noise to data: [steps + 1]."""
        return self._rule.grid(steps, device)

    def grid_levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """alpha and sigma along a grid; its end is free of noise."""
        return self._rule.grid_levels(t)

    def betas(self) -> Tensor:
        """Noise that the schedule adds in each step, float64 [STEPS]."""
        return betas(self.schedule)

    @property
    def uses_schedule(self) -> bool:
        """Whether `schedule` and `min_snr` mean anything to the objective."""
        return self._rule.uses_schedule

    @property
    def has_stock_pipeline(self) -> bool:
        """Whether diffusers' pipelines over latents can step it."""
        return self._rule.has_stock_pipeline

    def scheduler(self, pipeline: str | None) -> tuple[str, dict[str, Any]]:
        """(class, configuration) of the diffusers scheduler with the same path, as `pipeline` needs it; None is any."""
        return self._rule.scheduler(pipeline)


# Not cached by the path: a copy of it with another value would keep the objective of the first.
@lru_cache(maxsize=64)
def _objective(name: str, times: Times, schedule: Schedule, min_snr: float | None, shift: float) -> Objective:
    return find_objective(name)(times=times, schedule=schedule, min_snr=min_snr, shift=shift)
