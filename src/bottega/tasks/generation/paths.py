"""From data to noise and back: the path between them, what a model predicts on it, and when it is asked.

At time t a sample is alpha(t) * clean + sigma(t) * noise; t = 0 is data, t = 1 noise.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from bottega.core.noise import Noise

STEPS = 1000
"""Into so many steps noise and v cut the time, as DDPM does; a model is told times on this scale."""
LEAST_RATIO = 0.068
"""Of data to noise where a sampler of predicted noise begins: what Stable Diffusion's schedule ends with."""


Schedule = Literal["cosine", "linear", "scaled_linear"]


class Path(BaseModel):
    """`flow` is the straight line (rectified flow); `noise` and `v` keep the variance (DDPM, Salimans and Ho)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    objective: Literal["flow", "noise", "v"] = "flow"
    times: Literal["logit_normal", "uniform"] = "logit_normal"
    schedule: Schedule = "cosine"
    min_snr: float | None = None
    shift: float = 1.0
    """flow: above 1, training and sampler look more at times with much noise. A sample that says everything many times
    over, as a film does, can be told from stronger noise (Esser et al., 2024: by the square root of how many times)."""

    def draw_times(self, rng: Noise) -> Tensor:
        """When training looks, [B] in (0, 1). The logit-normal looks most where the path is hardest, in its middle."""
        if self.objective == "flow" and self.times == "logit_normal":
            return self._shifted(torch.sigmoid(rng.normal("time")))
        t = rng.uniform("time")
        return self._shifted(t) if self.objective == "flow" else torch.floor(t * STEPS) / STEPS

    def levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """alpha and sigma, as shaped as t."""
        if self.objective == "flow":
            return 1 - t, t
        kept = _kept(self.schedule, t.device)[self._step(t)]
        return kept.sqrt(), (1 - kept).sqrt()

    def model_time(self, t: Tensor) -> Tensor:
        """t as a model is told it."""
        return t * STEPS if self.objective == "flow" else self._step(t).float()

    def target(self, clean: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """What the model should predict; the levels are shaped to multiply a sample."""
        if self.objective == "flow":
            return noise - clean
        return noise if self.objective == "noise" else alpha * noise - sigma * clean

    def split(self, predicted: Tensor, x: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """(clean, noise) that a prediction at x stands for."""
        if self.objective == "flow":
            return x - sigma * predicted, x + alpha * predicted
        if self.objective == "noise":
            return (x - sigma * predicted) / alpha, predicted
        return alpha * x - sigma * predicted, sigma * x + alpha * predicted

    def weight(self, alpha: Tensor, sigma: Tensor) -> Tensor | None:
        """Min-SNR (Hang et al., 2023): what is nearly clean is easy and would count most."""
        if self.min_snr is None or self.objective == "flow":
            return None
        ratio = alpha.square() / sigma.square()
        capped = ratio.clamp(max=self.min_snr)
        return capped / ratio if self.objective == "noise" else capped / (ratio + 1)

    def error(self, predicted: Tensor, clean: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Of each sample [B]: the mean square of what is wrong, weighted where min_snr asks for it."""
        found = (predicted.float() - self.target(clean, noise, alpha, sigma)).square().flatten(1).mean(1)
        weight = self.weight(alpha.flatten(), sigma.flatten())
        return found if weight is None else found * weight

    @property
    def most_steps(self) -> int | None:
        """A sampler can take no more, because two of them would be the same; None is any number."""
        return None if self.objective == "flow" else self._start + 1

    def grid(self, steps: int, device: torch.device | str) -> Tensor:
        """The times a sampler visits, from noise to data: [steps + 1]."""
        if self.objective == "flow":
            return self._shifted(torch.linspace(1, 0, steps + 1, dtype=torch.float64, device=device))
        # Down to the very first step: a jump to the data from 1000 / steps cost scaled_linear 0.03 at 64 steps, and the
        # second-order methods their order. The end, 0 again, is not a step but the data themselves.
        trained = torch.linspace(self._start / STEPS, 0, steps, dtype=torch.float64, device=device)
        return torch.cat((trained, trained.new_zeros(1)))

    def _shifted(self, t: Tensor) -> Tensor:
        return t if self.shift == 1 else self.shift * t / (1 + (self.shift - 1) * t)

    def grid_levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """alpha and sigma along a grid; its end is free of noise."""
        alpha, sigma = self.levels(t)
        if self.objective == "flow":
            return alpha, sigma
        is_end = torch.arange(len(t), device=t.device) == len(t) - 1
        return torch.where(is_end, 1.0, alpha), torch.where(is_end, 0.0, sigma)

    @cached_property
    def _start(self) -> int:
        """The step a sampler begins at.

        Predicted noise is divided by alpha, which the cosine lets fall to 5e-5: digits of deviation 1,700 came out of a
        model of 600 steps, 1.8 from a ratio of 0.006 on, and 0.76 from this one on, where the data have 0.75.
        """
        if self.objective == "v":
            return STEPS - 1
        kept = _kept(self.schedule, torch.device("cpu"))
        alpha, sigma = kept.sqrt(), (1 - kept).sqrt()
        return int(torch.nonzero(alpha >= LEAST_RATIO * sigma).max())

    def _step(self, t: Tensor) -> Tensor:
        return (t * STEPS).round().long().clamp(0, STEPS - 1)

    def betas(self) -> Tensor:
        """Noise added in each step, float64 [STEPS]; the three are those of diffusers' DDPMScheduler."""
        return _betas(self.schedule)


def _betas(schedule: Schedule) -> Tensor:
    if schedule == "linear":
        return torch.linspace(1e-4, 0.02, STEPS, dtype=torch.float64)
    if schedule == "scaled_linear":
        return torch.linspace(0.00085**0.5, 0.012**0.5, STEPS, dtype=torch.float64).square()
    t = torch.arange(STEPS + 1, dtype=torch.float64) / STEPS
    bar = torch.cos((t + 0.008) / 1.008 * math.pi / 2).square()
    return (1 - bar[1:] / bar[:-1]).clamp(max=0.999)


@lru_cache(maxsize=16)
def _kept(schedule: Schedule, device: torch.device) -> Tensor:
    """The share of variance that is still data after each step (alpha bar), [STEPS], where it is used: copied at every
    step of a training, the host would wait for the device each time."""
    return torch.cumprod(1 - _betas(schedule), 0).to(device)
