"""Elastic weight consolidation: what mattered for earlier data is held where it was, as firmly as it mattered.

Kirkpatrick et al., 2017, in the form of Schwarz et al., 2018: one importance and one anchor for each weight, however many
sources there were, so that what is kept does not grow with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

import torch
from torch import Tensor

from bottega.core.types import Array
from bottega.techniques.wrapped_task import WrappedTask

FISHER, ANCHOR = "fisher/", "anchor/"


@final
class Ewc(WrappedTask):
    """Its state is an importance and an anchor for each weight that learns; `consolidated` says what both become."""

    overflows_by: ClassVar[str] = "techniques.ewc.strength"
    strength: float

    def state(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        learning = {name: p for name, p in parameters.items() if p.requires_grad and self.is_trainable(name)}
        zeros = {kind + name: torch.zeros_like(p) for kind in (FISHER, ANCHOR) for name, p in learning.items()}
        return {**self.inner.state(parameters), **{name: zero.requires_grad_(False) for name, zero in zeros.items()}}

    def penalty(self, parameters: Mapping[str, Array], state: Mapping[str, Array]) -> Array | None:
        """strength / 2 times the squared distances from the anchors, each by its importance: 0 before the first is known."""
        held = [name.removeprefix(FISHER) for name in state if name.startswith(FISHER)]
        moved = torch._foreach_sub([parameters[name] for name in held], [state[ANCHOR + name] for name in held])
        costs = torch._foreach_mul(torch._foreach_mul(moved, moved), [state[FISHER + name] for name in held])
        own = 0.5 * self.strength * torch.stack([cost.sum() for cost in costs]).sum()
        inner = self.inner.penalty(parameters, state)
        return own if inner is None else own + inner


@torch.no_grad()
def consolidate(
    state: Mapping[str, Tensor], parameters: Mapping[str, Tensor], importance: Mapping[str, Tensor], *, decay: float
) -> dict[str, Tensor]:
    """The state from now on: what the weights are is where they are held; what was known of importance counts `decay`
    beside it."""
    fisher = {FISHER + name: state[FISHER + name] * decay + found for name, found in importance.items()}
    return {**fisher, **{ANCHOR + name: parameters[name].detach() for name in importance}}
