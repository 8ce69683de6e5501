"""Leaky integrate-and-fire units, and layers and a router made of them.

S time steps   B batch   I inputs   N units   E experts   U units of a router

No state outlives a call: every train begins with units at rest. What enters all steps of a layer is one product of
matrices, and only the units themselves walk through time. Six layers of 512, a batch of 32 and 8 steps train in 31 ms on two
cores, 9 of them in the units: a backward written by hand would save few of these, and have no gradient of its own (maml).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from bottega.models.spiking.config import SpikingShape
from bottega.models.spiking.surrogate import smooth_spike, spike

SILENT, ALWAYS = 0, 2
"""What a unit did in one example: never fired, or whenever it could; 1 is in between."""
MAX_LOGIT = 8.0
"""The logit of a router's group that always fires: beside silent ones it has all but a thousandth of a softmax over four."""


class LIF(nn.Module):
    """charge = leak * charge + current, and a spike where it reaches the threshold. It has no weights.

    `smooth` replaces the step by the smooth one whose slope is used in backward: a unit that is differentiable, against
    which gradients can be checked.
    """

    def __init__(self, shape: SpikingShape, *, smooth: bool = False) -> None:
        super().__init__()
        self.shape, self.smooth = shape, smooth

    def forward(self, current: Tensor) -> Tensor:
        """Spikes [S, B, N] of currents [S, B, N]; any shape after the first axis will do."""
        shape = self.shape
        assert len(current), "units need a step of time at least; give currents [S, B, N] with S of 1 or more"
        if current.dtype in (torch.float16, torch.bfloat16):
            current = current.float()  # a charge is a long sum
        fire = smooth_spike if self.smooth else spike
        spikes: list[Tensor] = []
        charge: Tensor | None = None
        raised: Tensor | None = None
        for now in current.unbind(0):
            listens = _listens(spikes, shape.refractory)
            now = now if listens is None else now * listens
            charge = now if charge is None else torch.add(now, charge, alpha=shape.leak)
            if shape.adaptation and spikes:
                before = spikes[-1] * shape.adaptation
                raised = before if raised is None else torch.add(before, raised, alpha=shape.adaptation_leak)
            above = charge - shape.threshold if raised is None else charge - shape.threshold - raised
            fired = fire(above, shape.surrogate, shape.sharpness)
            fired = fired if listens is None else fired * listens
            charge = self._after(charge, above, fired)
            spikes.append(fired)
        return torch.stack(spikes)

    def _after(self, charge: Tensor, above: Tensor, fired: Tensor) -> Tensor:
        if self.shape.reset == "zero":
            return charge - charge * fired
        if not self.shape.adaptation:
            return torch.sub(charge, fired, alpha=self.shape.threshold)
        return charge - (charge - above) * fired  # by the threshold as it stands, raised

    def extra_repr(self) -> str:
        return f"{self.shape!r}"


def _listens(spikes: list[Tensor], steps: int) -> Tensor | None:
    """1 where none of the last spikes was so few steps ago, else 0. A product, so that a smooth unit has one as well."""
    found: Tensor | None = None
    for before in spikes[max(0, len(spikes) - steps) :] if steps else ():
        found = 1 - before if found is None else found * (1 - before)
    return found


class SpikingLayer(nn.Module):
    """Weights, and the units they charge."""

    def __init__(self, ins: int, outs: int, shape: SpikingShape, *, bias: bool = True, smooth: bool = False) -> None:
        super().__init__()
        self.synapse = nn.Linear(ins, outs, bias=bias)
        self.neuron = LIF(shape, smooth=smooth)

    def forward(self, x: Tensor) -> Tensor:
        """Spikes [S, B, N] of spikes or currents [S, B, I]."""
        if x.stride(0) == 0:  # one current for all steps (`expand`) is multiplied once and not S times
            return self.neuron(self.synapse(x[:1]).expand(len(x), -1, -1))
        return self.neuron(self.synapse(x))


class SpikingGate(nn.Module):
    """A router made of spiking units: each expert has a group of them, and the one whose group fires most is asked.

    Logits go from 0 to LOUDEST.
    """

    def __init__(self, ins: int, num_experts: int, shape: SpikingShape, *, group: int) -> None:
        super().__init__()
        self.shape, self.num_experts = shape, num_experts
        self.groups = SpikingLayer(ins, num_experts * group, shape)

    def forward(self, x: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [..., E] and firing rates [..., U] of x [..., I], the same current in every step.

        `counted` [...] changes nothing here. It is for who listens to the units (plasticity): padding teaches nothing.
        """
        train = x.reshape(1, -1, x.shape[-1]).expand(self.shape.time_steps, -1, -1)
        rates = spike_rate(self.groups(train)).view(*x.shape[:-1], self.groups.synapse.out_features)
        return MAX_LOGIT * rates.unflatten(-1, (self.num_experts, -1)).mean(-1), rates


def spike_rate(spikes: Tensor) -> Tensor:
    """[B, N]: the share of the steps in which each unit fired."""
    return spikes.sum(0) / len(spikes)  # divided last, so that 1 is exactly 1


def activity_sums(spikes: Tensor, counted: Tensor | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """Sums over the examples of [S, B, N] that `counted` [B] has: how often units fire, and the share that an example
    leaves silent. Of rates [B, N] that are there already, give `rates[None]`.

    Which units are dead or saturated is no mean over examples: see `unit_rows`.
    """
    rates = spike_rate(spikes.detach()).float().flatten(1)
    each = {"firing_rate": rates.mean(1), "silent": (rates == 0).float().mean(1)}
    counted = torch.ones_like(each["silent"], dtype=torch.bool) if counted is None else counted > 0
    number = counted.float().sum()
    return {name: (torch.where(counted, values, 0.0).sum(), number) for name, values in each.items()}


def unit_activity(spikes: Tensor, highest_rate: float = 1.0) -> Tensor:
    """uint8 [B, N]: what each unit did in each example, for `Loss.rows`; `unit_scores` reads it."""
    rates = spike_rate(spikes.detach()).float().flatten(1)
    return (rates > 0).to(torch.uint8) + (rates >= highest_rate - 1e-6).to(torch.uint8)


def unit_activity_metrics(rows: np.ndarray) -> dict[str, float]:
    """Shares of the units: those that fired in no step of any example, and those that fired in every one of all."""
    if not len(rows):
        return {}
    dead, saturated = rows.max(0) == SILENT, rows.min(0) == ALWAYS
    return {"dead": float(dead.mean()), "saturated": float(saturated.mean())}


def firing_rate_penalty(spikes: Tensor, target: float) -> Tensor:
    """How far each example's firing is from the target, squared and summed over examples.

    The mean over all units of the layer, and not each unit by itself: units may well be silent for most examples, and a
    cost on each would forbid them to tell anything apart.
    """
    return firing_rate_penalties(spikes, target).sum()


def firing_rate_penalties(spikes: Tensor, target: float) -> Tensor:
    """[B]: the same of each example."""
    return (spike_rate(spikes).flatten(1).mean(1) - target) ** 2
