"""The constants of spiking units, and the dimensions of a network of them that classifies pictures; no torch."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Reset = Literal["subtract", "zero"]
Surrogate = Literal["arctan", "sigmoid", "fast_sigmoid"]
Coding = Literal["constant", "rate", "latency"]


class SpikingShape(BaseModel):
    """How a unit charges, fires and rests. None of it is a weight, and all of it decides what the weights mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time_steps: int = Field(8, gt=0)
    threshold: float = Field(1.0, gt=0, allow_inf_nan=False)
    leak: float = Field(0.9, ge=0, le=1)
    """The share of the charge that stays from one step to the next: 1 only ever adds up, 0 forgets at once."""
    refractory: int = Field(0, ge=0)
    """Steps after a spike in which a unit hears nothing and cannot spike; its charge leaks on."""
    reset: Reset = "subtract"
    """What a spike leaves of the charge: what was over the threshold, or nothing."""
    adaptation: float = Field(0.0, ge=0, allow_inf_nan=False)
    """By how much each spike raises the unit's threshold (Bellec et al., 2018); 0 is the plain unit."""
    adaptation_leak: float = Field(0.9, ge=0, le=1)
    """The share of that raise that stays from one step to the next."""
    surrogate: Surrogate = "arctan"
    """The smooth step whose slope stands for that of the spike."""
    sharpness: float = Field(2.0, gt=0, allow_inf_nan=False)
    """How steep that step is: its slope at the threshold is half of this, for sigmoid a quarter."""

    @property
    def highest_rate(self) -> float:
        """Spikes a step of a unit that fires whenever it can."""
        return math.ceil(self.time_steps / (self.refractory + 1)) / self.time_steps


class SpikingNetShape(BaseModel):
    """All that decides the tensors of the classifier. Two equal shapes have interchangeable checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["spiking"] = "spiking"
    grid: tuple[int, ...] = Field(min_length=2, max_length=2)
    """Height and width of a picture."""
    channels: int = Field(gt=0)
    num_labels: int = Field(gt=1)
    hidden_size: int = Field(128, gt=0)
    """Units of a layer."""
    num_layers: int = Field(2, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    coding: Coding = "constant"
    """How a value becomes a train: the same current in every step, spikes as often as it is high, or one spike that comes
    the sooner the higher it is."""
    lowest: float = Field(-1.0, le=0)
    """Of the values a picture has; the highest is 1."""
    neuron: SpikingShape = Field(default_factory=SpikingShape)

    @property
    def num_inputs(self) -> int:
        return math.prod(self.grid) * self.channels

    @property
    def num_features(self) -> int:
        return self.hidden_size
