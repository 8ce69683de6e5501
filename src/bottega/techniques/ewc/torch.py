"""The state and the penalty of elastic weight consolidation in torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def create_zeros(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zeros like each parameter that is trained at some step, by name."""
    return {name: torch.zeros_like(p).requires_grad_(False) for name, p in parameters.items() if p.requires_grad}


def sum_weighted_squares(weights: list[Tensor], *, anchors: list[Tensor], importances: list[Tensor]) -> Tensor:
    """Return the sum over all weights of importance * (weight - anchor)^2."""
    differences = torch._foreach_sub(weights, anchors)
    costs = torch._foreach_mul(torch._foreach_mul(differences, differences), importances)
    return torch.stack([cost.sum() for cost in costs]).sum()
