"""Elastic weight consolidation: a quadratic penalty on changes of weights, scaled by their importance for earlier data.

Kirkpatrick et al., 2017, in the online form of Schwarz et al., 2018: one importance and one anchor per weight for all
sources together, so that the state does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

import torch
from torch import Tensor

from bottega.core.types import Array
from bottega.techniques.wrapped_task import WrappedTask

FISHER_PREFIX, ANCHOR_PREFIX = "fisher/", "anchor/"


@final
class Ewc(WrappedTask):
    """A task with the EWC penalty; its state is an importance and an anchor for each trainable weight."""

    divergence_key: ClassVar[str] = "techniques.ewc.strength"
    strength: float

    def state(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        trainable = {name: p for name, p in parameters.items() if p.requires_grad and self.is_trainable(name)}
        zeros = {
            kind + name: torch.zeros_like(p) for kind in (FISHER_PREFIX, ANCHOR_PREFIX) for name, p in trainable.items()
        }
        return {**self.inner.state(parameters), **{name: zero.requires_grad_(False) for name, zero in zeros.items()}}

    def penalty(self, parameters: Mapping[str, Array], state: Mapping[str, Array]) -> Array | None:
        """Return strength / 2 * sum(importance * (weight - anchor)^2), which is 0 during the first source."""
        names = [name.removeprefix(FISHER_PREFIX) for name in state if name.startswith(FISHER_PREFIX)]
        differences = torch._foreach_sub(
            [parameters[name] for name in names], [state[ANCHOR_PREFIX + name] for name in names]
        )
        costs = torch._foreach_mul(
            torch._foreach_mul(differences, differences), [state[FISHER_PREFIX + name] for name in names]
        )
        ewc_penalty = 0.5 * self.strength * torch.stack([cost.sum() for cost in costs]).sum()
        inner_penalty = self.inner.penalty(parameters, state)
        return ewc_penalty if inner_penalty is None else ewc_penalty + inner_penalty


@torch.no_grad()
def consolidate(
    state: Mapping[str, Tensor], parameters: Mapping[str, Tensor], importance: Mapping[str, Tensor], *, decay: float
) -> dict[str, Tensor]:
    """Return the state after a source: anchors at the current weights, and importance decayed and added to."""
    fisher = {FISHER_PREFIX + name: state[FISHER_PREFIX + name] * decay + new for name, new in importance.items()}
    return {**fisher, **{ANCHOR_PREFIX + name: parameters[name].detach() for name in importance}}
