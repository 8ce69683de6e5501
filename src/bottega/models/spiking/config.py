"""Settings of spiking units, and sizes of a spiking image classifier, without importing torch."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Reset = Literal["subtract", "zero"]
Surrogate = Literal["arctan", "sigmoid", "fast_sigmoid"]
Coding = Literal["constant", "rate", "latency"]


class SpikingShape(BaseModel):
    """Settings of leaky integrate-and-fire units; weights are trained for one setting of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time_steps: int = Field(8, gt=0)
    threshold: float = Field(1.0, gt=0, allow_inf_nan=False)
    leak: float = Field(0.9, ge=0, le=1)
    """Fraction of the membrane potential that remains after a step; with 1 nothing leaks, with 0 nothing is remembered."""
    refractory: int = Field(0, ge=0)
    """Steps after a spike in which a unit ignores its input and cannot spike; its potential still leaks."""
    reset: Reset = "subtract"
    """Reset by a spike: subtract the threshold from the potential, or set it to zero."""
    adaptation: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Increase of the unit's threshold by each of its spikes (Bellec et al., 2018); 0: no adaptation."""
    adaptation_leak: float = Field(0.9, ge=0, le=1)
    """Fraction of that increase that remains after a step."""
    surrogate: Surrogate = "arctan"
    """Smooth step function whose derivative replaces that of the spike."""
    sharpness: float = Field(2.0, gt=0, allow_inf_nan=False)
    """Steepness of that function: its slope at the threshold is half of this value, or a quarter of it for sigmoid."""

    @property
    def highest_rate(self) -> float:
        """Spikes per step of a unit that fires whenever it can."""
        return math.ceil(self.time_steps / (self.refractory + 1)) / self.time_steps


class SpikingNetShape(BaseModel):
    """Sizes of the classifier. Models of equal shapes have interchangeable checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["spiking"] = "spiking"
    grid: tuple[int, ...] = Field(min_length=2, max_length=2)
    """Height and width of an image."""
    channels: int = Field(gt=0)
    num_labels: int = Field(gt=1)
    hidden_size: int = Field(128, gt=0)
    """Units per layer."""
    num_layers: int = Field(2, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    coding: Coding = "constant"
    """Encoding of a value: a constant current, spikes at a rate equal to it, or one spike that comes earlier for higher
    values."""
    lowest: float = Field(-1.0, le=0)
    """Lowest value of an image; the highest is 1."""
    neuron: SpikingShape = Field(default_factory=SpikingShape)

    @property
    def num_inputs(self) -> int:
        return math.prod(self.grid) * self.channels

    @property
    def num_features(self) -> int:
        return self.hidden_size
