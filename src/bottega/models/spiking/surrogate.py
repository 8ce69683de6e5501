"""Spike function with a surrogate gradient: a step in the forward, the derivative of a smooth step in the backward.

The derivative of the step is 0 wherever it is defined, so it cannot train anything (Neftci et al., 2019).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bottega.models.spiking.config import Surrogate


def spike(excess: Tensor, kind: Surrogate = "arctan", sharpness: float = 2.0) -> Tensor:
    """Return exactly 1 where `excess`, the potential minus the threshold, is not negative, else exactly 0."""
    return _Spike.apply(excess, kind, sharpness)


def smooth_spike(excess: Tensor, kind: Surrogate = "arctan", sharpness: float = 2.0) -> Tensor:
    """Return the smooth step from 0 to 1 whose derivative `spike` uses."""
    scaled = sharpness * excess
    if kind == "arctan":
        return torch.atan(math.pi / 2 * scaled) / math.pi + 0.5
    if kind == "sigmoid":
        return torch.sigmoid(scaled)
    return 0.5 * scaled / (1 + scaled.abs()) + 0.5


def surrogate_gradient(excess: Tensor, kind: Surrogate = "arctan", sharpness: float = 2.0) -> Tensor:
    """Return the derivative of `smooth_spike`: sharpness / 2 at the threshold, / 4 for sigmoid; its integral is 1."""
    scaled = sharpness * excess
    if kind == "arctan":
        return (sharpness / 2) / (1 + (math.pi / 2 * scaled) ** 2)
    if kind == "sigmoid":
        value = torch.sigmoid(scaled)
        return sharpness * value * (1 - value)
    return (sharpness / 2) / (1 + scaled.abs()) ** 2


class _Spike(torch.autograd.Function):
    """A custom autograd function, because `smooth + (step - smooth).detach()` rounds: it gave 0.99999994 for 1."""

    generate_vmap_rule = True

    @staticmethod
    def forward(excess: Tensor, kind: Surrogate, sharpness: float) -> Tensor:
        return (excess >= 0).to(excess.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        excess, ctx.kind, ctx.sharpness = inputs
        ctx.save_for_backward(excess)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Differentiable operations on the input, so that second-order gradients (MAML) are right as well.
        (excess,) = ctx.saved_tensors
        return gradients[0] * surrogate_gradient(excess, ctx.kind, ctx.sharpness), None, None
