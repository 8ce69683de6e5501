"""What an objective decides: the levels of data and noise over time, what a model predicts, and where a sampler goes.

At time t a sample is alpha(t) * clean + sigma(t) * noise; t = 0 is data, t = 1 noise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bottega.core.noise import Noise
from bottega.tasks.generation.schedules import DIFFUSERS, STEPS, Schedule, alpha_bar, betas

Times = Literal["logit_normal", "uniform"]


@dataclass(frozen=True)
class Objective(ABC):
    """The fields are those of a `Path`; an objective looks at those that it has a use for."""

    times: Times
    schedule: Schedule
    min_snr: float | None
    shift: float

    uses_schedule: ClassVar[bool]
    """Whether `schedule` and `min_snr` mean anything to it."""
    has_stock_pipeline: ClassVar[bool]
    """Whether diffusers' pipelines over latents can step it: they ask a scheduler to scale the model's input first."""

    @abstractmethod
    def draw_times(self, rng: Noise) -> Tensor:
        """When training looks, [B] in (0, 1)."""

    @abstractmethod
    def levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """alpha and sigma, as shaped as t."""

    @abstractmethod
    def model_time(self, t: Tensor) -> Tensor:
        """t on the scale of the model's input, from 0 to 1,000."""

    @abstractmethod
    def target(self, clean: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """What the model should predict; the levels are shaped to multiply a sample."""

    @abstractmethod
    def split_prediction(self, predicted: Tensor, x: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """(clean, noise) that a prediction at x stands for."""

    @abstractmethod
    def grid(self, steps: int, device: torch.device | str) -> Tensor:
        """The times a sampler visits, from noise to data: [steps + 1]."""

    @abstractmethod
    def scheduler(self, pipeline: str | None) -> tuple[str, dict[str, Any]]:
        """(class, configuration) of the diffusers scheduler with the same path, as `pipeline` needs it; None is any."""

    def grid_levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """alpha and sigma along a grid; its end is free of noise."""
        return self.levels(t)

    def weight(self, alpha: Tensor, sigma: Tensor) -> Tensor | None:
        """How much each sample counts, [B]; None is all alike."""
        return None

    def error(self, predicted: Tensor, clean: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """What is minimised, of each sample [B]: the mean square of what is wrong, by its weight."""
        errors = (predicted.float() - self.target(clean, noise, alpha, sigma)).square().flatten(1).mean(1)
        weight = self.weight(alpha.flatten(), sigma.flatten())
        return errors if weight is None else errors * weight

    @property
    def max_steps(self) -> int | None:
        """A sampler can take no more, because two of them would be the same; None is any number."""
        return None


class VariancePreserving(Objective):
    """1,000 steps of a noise schedule, in which alpha^2 + sigma^2 = 1, as in DDPM. What is predicted is left open."""

    uses_schedule = True
    has_stock_pipeline = True
    prediction_type: ClassVar[str]
    """diffusers' word for what is predicted."""

    def draw_times(self, rng: Noise) -> Tensor:
        """One of the steps, each as likely."""
        return torch.floor(rng.uniform("time") * STEPS) / STEPS

    def levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        signal = alpha_bar(self.schedule, t.device)[_step(t)]
        return signal.sqrt(), (1 - signal).sqrt()

    def model_time(self, t: Tensor) -> Tensor:
        return _step(t).float()

    def weight(self, alpha: Tensor, sigma: Tensor) -> Tensor | None:
        """Min-SNR (Hang et al., 2023): what is nearly clean is easy and would count most."""
        return None if self.min_snr is None else self.min_snr_weight(alpha.square() / sigma.square(), self.min_snr)

    @abstractmethod
    def min_snr_weight(self, snr: Tensor, most: float) -> Tensor:
        """The Min-SNR weight at these ratios of data to noise, for what this objective predicts."""

    @cached_property
    def first_step(self) -> int:
        """The step a sampler begins at."""
        return STEPS - 1

    @property
    def max_steps(self) -> int | None:
        return self.first_step + 1

    def grid(self, steps: int, device: torch.device | str) -> Tensor:
        # Down to the very first step: a jump to the data from 1000 / steps cost scaled_linear 0.03 at 64 steps, and the
        # second-order methods their order. The end, 0 again, is not a step but the data themselves.
        trained = torch.linspace(self.first_step / STEPS, 0, steps, dtype=torch.float64, device=device)
        return torch.cat((trained, trained.new_zeros(1)))

    def grid_levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        alpha, sigma = self.levels(t)
        is_end = torch.arange(len(t), device=t.device) == len(t) - 1
        return torch.where(is_end, 1.0, alpha), torch.where(is_end, 0.0, sigma)

    def scheduler(self, pipeline: str | None) -> tuple[str, dict[str, Any]]:
        schedule, first, last = DIFFUSERS[self.schedule]
        is_plain = pipeline == "DDPMPipeline"
        config: dict[str, Any] = {
            "num_train_timesteps": STEPS,
            "beta_schedule": schedule,
            "beta_start": first,
            "beta_end": last,
            "prediction_type": self.prediction_type,
            # Pixels end at -1 and 1, latents nowhere.
            "clip_sample": is_plain,
            # From the last trained step down, where there is nothing but noise, as our samplers go.
            "timestep_spacing": "trailing",
        }
        if is_plain:
            return "DDPMScheduler", config
        # Trailing steps have no offset; Stable Diffusion's pipeline warns about any but 1.
        config |= {"set_alpha_to_one": True, "steps_offset": 1}
        steps = self.first_step + 1
        if steps < STEPS:
            # Where nothing is clipped, predicted noise near the end of a schedule is divided by nearly nothing; our
            # samplers begin earlier, and so does a scheduler that knows of no later steps.
            config |= {"num_train_timesteps": steps, "trained_betas": betas(self.schedule)[:steps].tolist()}
        return "DDIMScheduler", config


def _step(t: Tensor) -> Tensor:
    return (t * STEPS).round().long().clamp(0, STEPS - 1)
