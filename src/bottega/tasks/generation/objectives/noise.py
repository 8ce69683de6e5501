"""Noise prediction (DDPM; Ho et al., 2020)."""

from __future__ import annotations

from functools import cached_property
from typing import final

import torch
from torch import Tensor

from bottega.tasks.generation.objectives.base import VariancePreserving
from bottega.tasks.generation.schedules import alpha_bar

LEAST_RATIO = 0.068
"""Of data to noise where a sampler begins: what Stable Diffusion's schedule ends with."""


@final
class NoisePrediction(VariancePreserving):
    prediction_type = "epsilon"

    def target(self, clean: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        return noise

    def split_prediction(self, predicted: Tensor, x: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        return (x - sigma * predicted) / alpha, predicted

    def min_snr_weight(self, snr: Tensor, most: float) -> Tensor:
        return snr.clamp(max=most) / snr

    @cached_property
    def first_step(self) -> int:
        """The last with enough of the data left.

        Predicted noise is divided by alpha, which the cosine lets fall to 5e-5: digits of deviation 1,700 came out of a
        model of 600 steps, 1.8 from a ratio of 0.006 on, and 0.76 from this one on, where the data have 0.75.
        """
        signal = alpha_bar(self.schedule, torch.device("cpu"))
        alpha, sigma = signal.sqrt(), (1 - signal).sqrt()
        return int(torch.nonzero(alpha >= LEAST_RATIO * sigma).max())


OBJECTIVE = NoisePrediction
