"""A spike: a step forward, and in backward the slope of a smooth step in its place.

The slope of the step itself is 0 wherever it is defined, so nothing would learn from it (Neftci et al., 2019).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bottega.models.spiking.config import Surrogate


def spike(charge: Tensor, kind: Surrogate = "arctan", sharpness: float = 2.0) -> Tensor:
    """1 where the charge, counted from the threshold, is not negative, else 0: exactly."""
    return _Spike.apply(charge, kind, sharpness)


def smooth_spike(charge: Tensor, kind: Surrogate = "arctan", sharpness: float = 2.0) -> Tensor:
    """The smooth step from 0 to 1 whose slope `spike` borrows."""
    scaled = sharpness * charge
    if kind == "arctan":
        return torch.atan(math.pi / 2 * scaled) / math.pi + 0.5
    if kind == "sigmoid":
        return torch.sigmoid(scaled)
    return 0.5 * scaled / (1 + scaled.abs()) + 0.5


def surrogate_gradient(charge: Tensor, kind: Surrogate = "arctan", sharpness: float = 2.0) -> Tensor:
    """The derivative of `smooth_spike`: at the threshold sharpness / 2, or / 4 of the sigmoid; under it the area is 1."""
    scaled = sharpness * charge
    if kind == "arctan":
        return (sharpness / 2) / (1 + (math.pi / 2 * scaled) ** 2)
    if kind == "sigmoid":
        share = torch.sigmoid(scaled)
        return sharpness * share * (1 - share)
    return (sharpness / 2) / (1 + scaled.abs()) ** 2


class _Spike(torch.autograd.Function):
    """A function of its own, because `smooth + (step - smooth).detach()` rounds: it gave 0.99999994 for 1."""

    generate_vmap_rule = True

    @staticmethod
    def forward(charge: Tensor, kind: Surrogate, sharpness: float) -> Tensor:
        return (charge >= 0).to(charge.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        charge, ctx.kind, ctx.sharpness = inputs
        ctx.save_for_backward(charge)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # From what came in, and by operations torch knows, so that a gradient of the gradient (maml) is right as well.
        (charge,) = ctx.saved_tensors
        return gradients[0] * surrogate_gradient(charge, ctx.kind, ctx.sharpness), None, None
