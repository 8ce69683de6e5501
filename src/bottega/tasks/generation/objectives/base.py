"""Base classes of objectives: noise levels over time, the prediction target, and the times of a sampler.

At time t a sample is alpha(t) * clean + sigma(t) * noise; t = 0 is data, t = 1 noise. The formulas are the same on arrays of
numpy, torch and JAX.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np

from bottega.core.noise import Noise
from bottega.core.types import Array
from bottega.tasks.generation.arrays import as_float32, get_namespace
from bottega.tasks.generation.schedules import DIFFUSERS_SCHEDULES, NUM_TRAIN_TIMESTEPS, Schedule, betas, get_levels

Times = Literal["logit_normal", "uniform"]


@dataclass(frozen=True)
class Objective(ABC):
    """A diffusion objective. Its fields are those of `NoisePath`; an objective ignores those that do not apply to it."""

    times: Times
    schedule: Schedule
    min_snr: float | None
    shift: float

    uses_schedule: ClassVar[bool]
    """Whether it uses `schedule` and `min_snr`."""
    has_stock_pipeline: ClassVar[bool]
    """Whether the latent pipelines of diffusers can sample it: they need a scheduler with scale_model_input."""

    @abstractmethod
    def draw_times(self, rng: Noise) -> Array:
        """Return training times (batch,) in (0, 1)."""

    @abstractmethod
    def levels(self, t: Array) -> tuple[Array, Array]:
        """Return alpha and sigma in the shape of t."""

    @abstractmethod
    def model_time(self, t: Array) -> Array:
        """Return t as the model's time input, on a scale from 0 to 1,000."""

    @abstractmethod
    def target(self, clean: Array, noise: Array, alpha: Array, sigma: Array) -> Array:
        """Return the prediction target; alpha and sigma broadcast against a sample."""

    @abstractmethod
    def split_prediction(self, predicted: Array, x: Array, alpha: Array, sigma: Array) -> tuple[Array, Array]:
        """Return the (clean, noise) that a prediction for the noisy sample x implies."""

    @abstractmethod
    def grid(self, steps: int) -> np.ndarray:
        """Return the times of a sampler from noise to data, float64 (steps + 1,)."""

    @abstractmethod
    def scheduler(self, pipeline: str | None) -> tuple[str, dict[str, Any]]:
        """Return (class, configuration) of the diffusers scheduler with the same path, as `pipeline` needs it."""

    def grid_levels(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return alpha and sigma along a grid of times; sigma is 0 at its end."""
        return self.levels(t)

    def weight(self, alpha: Array, sigma: Array) -> Array | None:
        """Return the loss weight of each sample (batch,), or None if all weights are 1."""
        return None

    def error(self, predicted: Array, clean: Array, noise: Array, alpha: Array, sigma: Array) -> Array:
        """Return the weighted mean squared error of each sample (batch,)."""
        xp = get_namespace(noise)
        # The target is float32, and so is the difference, whatever the prediction is.
        squares = xp.square(predicted - self.target(clean, noise, alpha, sigma))
        errors = squares.reshape(len(squares), -1).mean(1)
        weight = self.weight(alpha.reshape(-1), sigma.reshape(-1))
        return errors if weight is None else errors * weight

    @property
    def max_steps(self) -> int | None:
        """Largest number of sampler steps, beyond which two would fall on the same time; None: no limit."""
        return None


class VariancePreserving(Objective):
    """1,000 steps of a noise schedule, in which alpha^2 + sigma^2 = 1, as in DDPM; subclasses define the target."""

    uses_schedule = True
    has_stock_pipeline = True
    prediction_type: ClassVar[str]
    """Name of the target in diffusers."""

    def draw_times(self, rng: Noise) -> Array:
        """Return uniformly drawn steps as times."""
        return rng.xp.floor(rng.uniform("time") * NUM_TRAIN_TIMESTEPS) / NUM_TRAIN_TIMESTEPS

    def levels(self, t: Array) -> tuple[Array, Array]:
        xp = get_namespace(t)
        steps = xp.asarray(_round_to_step(t), dtype=xp.int32)
        alphas, sigmas = get_levels(self.schedule, t)
        return alphas[steps], sigmas[steps]

    def model_time(self, t: Array) -> Array:
        return as_float32(_round_to_step(t))

    def weight(self, alpha: Array, sigma: Array) -> Array | None:
        """Return the Min-SNR weight (Hang et al., 2023), which limits the weight of nearly clean samples."""
        return None if self.min_snr is None else self.min_snr_weight((alpha * alpha) / (sigma * sigma), self.min_snr)

    @abstractmethod
    def min_snr_weight(self, snr: Array, max_snr: float) -> Array:
        """Return the Min-SNR weight at these signal-to-noise ratios for this objective's target."""

    @cached_property
    def first_step(self) -> int:
        """The step at which a sampler starts."""
        return NUM_TRAIN_TIMESTEPS - 1

    @property
    def max_steps(self) -> int | None:
        return self.first_step + 1

    def grid(self, steps: int) -> np.ndarray:
        # Down to step 0: a jump from step 1000 / steps to the data had an error of 0.03 with scaled_linear at 64 steps, and
        # made the second-order methods first-order. The last time, 0 again, is not a step but the data themselves.
        return np.append(np.linspace(self.first_step / NUM_TRAIN_TIMESTEPS, 0, steps), 0.0)

    def grid_levels(self, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        alpha, sigma = self.levels(t)
        return np.append(alpha[:-1], 1.0), np.append(sigma[:-1], 0.0)

    def scheduler(self, pipeline: str | None) -> tuple[str, dict[str, Any]]:
        schedule, beta_start, beta_end = DIFFUSERS_SCHEDULES[self.schedule]
        is_ddpm_pipeline = pipeline == "DDPMPipeline"
        config: dict[str, Any] = {
            "num_train_timesteps": NUM_TRAIN_TIMESTEPS,
            "beta_schedule": schedule,
            "beta_start": beta_start,
            "beta_end": beta_end,
            "prediction_type": self.prediction_type,
            # Pixels are bounded by -1 and 1, latents are not.
            "clip_sample": is_ddpm_pipeline,
            # Start at the last trained step, which is pure noise, as our samplers do.
            "timestep_spacing": "trailing",
        }
        if is_ddpm_pipeline:
            return "DDPMScheduler", config
        # Trailing steps have no offset; Stable Diffusion's pipeline warns about any but 1.
        config |= {"set_alpha_to_one": True, "steps_offset": 1}
        steps = self.first_step + 1
        if steps < NUM_TRAIN_TIMESTEPS:
            # Without clipping, noise predicted near the end of a schedule is divided by almost 0. Our samplers start
            # earlier, and so does a scheduler whose betas end there.
            config |= {"num_train_timesteps": steps, "trained_betas": betas(self.schedule)[:steps].tolist()}
        return "DDIMScheduler", config


def _round_to_step(t: Array) -> Array:
    return (t * NUM_TRAIN_TIMESTEPS).round().clip(0, NUM_TRAIN_TIMESTEPS - 1)
