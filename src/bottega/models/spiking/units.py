"""Leaky integrate-and-fire (LIF) units, and layers and a router of them.

S time steps   B batch   I inputs   N units   E experts   U units of a router

Units keep no state between calls: every spike train starts with units at rest. The input of a layer at all steps is one
matrix product, and only the units loop over time. A training step of six layers of 512 units, with a batch of 32 and 8 time
steps, takes 31 ms on two cores, 9 ms of it in the units: a custom backward would save little, and would have no second-order
gradient, which MAML needs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from bottega.models.spiking.config import SpikingShape
from bottega.models.spiking.surrogate import smooth_spike, spike

SILENT, SATURATED = 0, 2
"""Activity of a unit in one example: never fired, or fired whenever it could; 1 is in between."""
MAX_LOGIT = 8.0
"""Logit of a group that always fires; beside three silent groups its softmax probability is 0.999."""


class LIF(nn.Module):
    """Leaky integrate-and-fire units: potential = leak * potential + current, and a spike at the threshold. No weights.

    `smooth` replaces the step function by the smooth one whose derivative is the surrogate gradient: for checking gradients.
    """

    def __init__(self, shape: SpikingShape, *, smooth: bool = False) -> None:
        super().__init__()
        self.shape, self.smooth = shape, smooth

    def forward(self, current: Tensor) -> Tensor:
        """Return the spikes (S, B, N) of currents (S, B, N); there may be any axes after the first."""
        shape = self.shape
        assert len(current), "LIF needs at least one time step; expected currents (S, B, N) with S of 1 or more"
        if current.dtype in (torch.float16, torch.bfloat16):
            current = current.float()  # the potential is a long sum
        fire = smooth_spike if self.smooth else spike
        spikes: list[Tensor] = []
        potential: Tensor | None = None
        threshold_increase: Tensor | None = None
        for step_current in current.unbind(0):
            can_fire = _find_ready_units(spikes, shape.refractory)
            step_current = step_current if can_fire is None else step_current * can_fire
            potential = step_current if potential is None else torch.add(step_current, potential, alpha=shape.leak)
            if shape.adaptation and spikes:
                increase = spikes[-1] * shape.adaptation
                threshold_increase = (
                    increase
                    if threshold_increase is None
                    else torch.add(increase, threshold_increase, alpha=shape.adaptation_leak)
                )
            excess = (
                potential - shape.threshold
                if threshold_increase is None
                else potential - shape.threshold - threshold_increase
            )
            new_spikes = fire(excess, shape.surrogate, shape.sharpness)
            new_spikes = new_spikes if can_fire is None else new_spikes * can_fire
            potential = self._reset_fired(potential, excess, new_spikes)
            spikes.append(new_spikes)
        return torch.stack(spikes)

    def _reset_fired(self, potential: Tensor, excess: Tensor, new_spikes: Tensor) -> Tensor:
        if self.shape.reset == "zero":
            return potential - potential * new_spikes
        if not self.shape.adaptation:
            return torch.sub(potential, new_spikes, alpha=self.shape.threshold)
        return potential - (potential - excess) * new_spikes  # subtract the adapted threshold

    def extra_repr(self) -> str:
        return f"{self.shape!r}"


def _find_ready_units(spikes: list[Tensor], num_steps: int) -> Tensor | None:
    """Return 1 for units without a spike in the last `num_steps` steps, else 0.

    A product rather than a comparison, so that it is differentiable with smooth spikes.
    """
    can_fire: Tensor | None = None
    for previous in spikes[max(0, len(spikes) - num_steps) :] if num_steps else ():
        can_fire = 1 - previous if can_fire is None else can_fire * (1 - previous)
    return can_fire


class SpikingLayer(nn.Module):
    """A linear layer whose outputs are the currents of LIF units."""

    def __init__(
        self, in_features: int, out_features: int, shape: SpikingShape, *, bias: bool = True, smooth: bool = False
    ) -> None:
        super().__init__()
        self.synapse = nn.Linear(in_features, out_features, bias=bias)
        self.neuron = LIF(shape, smooth=smooth)

    def forward(self, x: Tensor) -> Tensor:
        """Return the spikes (S, B, N) for spikes or currents (S, B, I)."""
        if x.stride(0) == 0:  # a constant current (`expand`) is multiplied once, not S times
            return self.neuron(self.synapse(x[:1]).expand(len(x), -1, -1))
        return self.neuron(self.synapse(x))


class SpikingGate(nn.Module):
    """Router of spiking units: each expert has a group of units, and those whose groups fire most are selected.

    Logits are between 0 and MAX_LOGIT.
    """

    def __init__(self, in_features: int, num_experts: int, shape: SpikingShape, *, group_size: int) -> None:
        super().__init__()
        self.shape, self.num_experts = shape, num_experts
        self.groups = SpikingLayer(in_features, num_experts * group_size, shape)

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits (..., E) and firing rates (..., U) of x (..., I), a constant current.

        `token_mask` (...) is true where x is not padding. It is not used here, but by plasticity, which records the
        arguments of calls.
        """
        currents = x.reshape(1, -1, x.shape[-1]).expand(self.shape.time_steps, -1, -1)
        rates = spike_rate(self.groups(currents)).view(*x.shape[:-1], self.groups.synapse.out_features)
        return MAX_LOGIT * rates.unflatten(-1, (self.num_experts, -1)).mean(-1), rates


def spike_rate(spikes: Tensor) -> Tensor:
    """Return the fraction of steps in which each unit fired, (B, N)."""
    return spikes.sum(0) / len(spikes)  # divided last, so that 1 is exactly 1


def sum_activity(spikes: Tensor, example_mask: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each metric of spikes (S, B, N) as (sum over the examples where `example_mask` (B) is true, their number).

    `firing_rate` is the mean rate of the units, `silent` the fraction of units that do not fire. For rates (B, N) pass
    `rates[None]`. Dead and saturated units are not a mean over examples: see `unit_activity`.
    """
    rates = spike_rate(spikes.detach()).float().flatten(1)
    metrics = {"firing_rate": rates.mean(1), "silent": (rates == 0).float().mean(1)}
    is_counted = torch.ones_like(metrics["silent"], dtype=torch.bool) if example_mask is None else example_mask > 0
    num_examples = is_counted.float().sum()
    return {name: (torch.where(is_counted, values, 0.0).sum(), num_examples) for name, values in metrics.items()}


def unit_activity(spikes: Tensor, highest_rate: float = 1.0) -> Tensor:
    """Return the activity of each unit in each example, uint8 (B, N): SILENT, 1 or SATURATED."""
    rates = spike_rate(spikes.detach()).float().flatten(1)
    return (rates > 0).to(torch.uint8) + (rates >= highest_rate - 1e-6).to(torch.uint8)


def unit_activity_metrics(activity: np.ndarray) -> dict[str, float]:
    """Return the fractions of units that never fired in any example, and that fired whenever they could in all.

    `activity` (examples, N) is that of `unit_activity`.
    """
    if not len(activity):
        return {}
    dead, saturated = activity.max(0) == SILENT, activity.min(0) == SATURATED
    return {"dead": float(dead.mean()), "saturated": float(saturated.mean())}


def firing_rate_penalty(spikes: Tensor, target: float) -> Tensor:
    """Return the squared difference between each example's mean firing rate and the target, summed over examples.

    The mean is over all units of the layer: a penalty on single units would prevent them from being silent for most
    examples, as selective units are.
    """
    return firing_rate_penalties(spikes, target).sum()


def firing_rate_penalties(spikes: Tensor, target: float) -> Tensor:
    """Return the penalty of each example, (B,)."""
    return (spike_rate(spikes).flatten(1).mean(1) - target) ** 2
