"""The dimensions of a layer of experts, how tokens find theirs, and what it costs; no torch."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bottega.models.spiking.config import SpikingShape

SPIKING_UNITS_PER_EXPERT = 8
"""Units of a spiking router that speak for one expert."""


class ExpertsShape(BaseModel):
    """All that decides the tensors of the layer and the way through it. Two equal shapes have interchangeable checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int
    expert_size: int
    num_experts: int
    top_k: int = 1
    activation: Literal["swiglu", "gelu"] = "swiglu"
    gate: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool | None = None
    """Whether the gates of the chosen experts sum to 1. None: where there are several; the gate of a single one would be 1,
    and no gradient would reach the router."""
    num_shared: int = 0
    """Experts that see everything."""
    shared_size: int | None = None
    """Width of a shared expert; None is that of the others."""
    capacity_factor: float | None = Field(None, allow_inf_nan=False)
    """Room of an expert in a group while training, in shares of an even split."""
    capacity: int | None = None
    """The same in choices. Neither: nothing is ever dropped."""
    expert_dropout: float = Field(0.0, ge=0, lt=1)
    """Share of the experts that are left out of a step; `top_k` of them always stay."""
    balance: Literal["loss", "bias", "none"] = "loss"
    bias_rate: float = Field(1e-3, gt=0, allow_inf_nan=False)
    load_decay: float = Field(0.9, ge=0, lt=1)
    """The share of the running load that stays from one step to the next."""
    router: Literal["linear", "spiking"] = "linear"
    spiking: SpikingShape | None = None
    """The units of a spiking router; None takes the usual ones."""

    @model_validator(mode="after")
    def _has_sizes(self) -> ExpertsShape:
        for name in ("hidden_size", "expert_size", "num_experts", "top_k", "num_shared", "shared_size"):
            value, least = getattr(self, name), 0 if name == "num_shared" else 1
            if value is not None and value < least:
                raise ValueError(f"{name} {value} is too few; give at least {least}")
        for name, wanted in (("capacity", "at least 1"), ("capacity_factor", "more than 0")):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} {value:g} is no room; give {wanted}, or leave it out and nothing is dropped")
        return self

    @model_validator(mode="after")
    def _can_route(self) -> ExpertsShape:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k {self.top_k} is more than num_experts {self.num_experts}: a token asks each expert once; "
                f"lower top_k to {self.num_experts} or raise num_experts"
            )
        if self.capacity is not None and self.capacity_factor is not None:
            raise ValueError(
                f"capacity {self.capacity} and capacity_factor {self.capacity_factor:g} both set an expert's room; "
                "keep one of them"
            )
        if self.shared_size is not None and not self.num_shared:
            raise ValueError(
                f"shared_size {self.shared_size} has no shared expert to be of; set num_shared, or leave it out"
            )
        if self.spiking is not None and self.router != "spiking":
            raise ValueError(f"spiking is set and router is {self.router!r}; set router to 'spiking', or leave it out")
        return self

    @property
    def renormalises(self) -> bool:
        return self.top_k > 1 if self.renormalise is None else self.renormalise

    @property
    def shared_width(self) -> int:
        """Of all shared experts together: side by side they are one."""
        return self.num_shared * (self.shared_size or self.expert_size)

    @property
    def has_capacity_limit(self) -> bool:
        """Whether an expert can be full."""
        return self.capacity is not None or self.capacity_factor is not None

    @property
    def spiking_units(self) -> SpikingShape | None:
        """Of the router, if it spikes."""
        return (self.spiking or SpikingShape()) if self.router == "spiking" else None

    def capacity_for(self, tokens: int) -> int:
        """How many choices of a group of so many tokens an expert takes."""
        if self.capacity is not None:
            return self.capacity
        assert self.capacity_factor is not None
        # 1.1 * 10 is 11.000000000000002: what is a whole number but for rounding is that number.
        return math.ceil(self.capacity_factor * self.top_k * tokens / self.num_experts - 1e-6)

    def num_parameters(self) -> int:
        """The exact number of parameters."""
        return self._router() + self.num_experts * self._expert(self.expert_size) + self._expert(self.shared_width)

    def num_active_parameters(self) -> int:
        """Those that one token meets."""
        return self._router() + self.top_k * self._expert(self.expert_size) + self._expert(self.shared_width)

    def _expert(self, size: int) -> int:
        return (3 if self.activation == "swiglu" else 2) * self.hidden_size * size

    def _router(self) -> int:
        if self.router == "linear":
            return self.num_experts * self.hidden_size
        return self.num_experts * SPIKING_UNITS_PER_EXPERT * (self.hidden_size + 1)
