"""Dimensions, routing and cost of a mixture-of-experts layer; no torch."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bottega.models.spiking.config import SpikingShape

SPIKING_UNITS_PER_EXPERT = 8
"""Units of a spiking router that vote for one expert."""


class ExpertsShape(BaseModel):
    """Dimensions and routing of the layer. Two equal shapes have interchangeable checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int
    expert_size: int
    num_experts: int
    top_k: int = 1
    activation: Literal["swiglu", "gelu"] = "swiglu"
    gate: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool | None = None
    """Whether the gates of the chosen experts are normalised to sum to 1. None: only if several are chosen; a single gate
    would always be 1, and no gradient would reach the router."""
    num_shared: int = 0
    """Number of experts that process every token."""
    shared_size: int | None = None
    """Width of a shared expert; None is expert_size."""
    capacity_factor: float | None = Field(None, allow_inf_nan=False)
    """Capacity of an expert in training, relative to an even split of a group's choices. A group is one row of tokens, or
    all samples of a forward."""
    capacity: int | None = None
    """Capacity as a number of choices. If neither is set, no token is dropped."""
    expert_dropout: float = Field(0.0, ge=0, lt=1)
    """Fraction of the experts that are dropped in a step; at least `top_k` always remain."""
    balance: Literal["loss", "bias", "none"] = "loss"
    bias_rate: float = Field(1e-3, gt=0, allow_inf_nan=False)
    """Change of the routing bias per step, with balance: bias."""
    load_decay: float = Field(0.9, ge=0, lt=1)
    """Decay of the running load per step."""
    router: Literal["linear", "spiking"] = "linear"
    spiking: SpikingShape | None = None
    """The units of a spiking router; None is the default."""

    @model_validator(mode="after")
    def _check_sizes(self) -> ExpertsShape:
        for name in ("hidden_size", "expert_size", "num_experts", "top_k", "num_shared", "shared_size"):
            value, minimum = getattr(self, name), 0 if name == "num_shared" else 1
            if value is not None and value < minimum:
                raise ValueError(f"{name} {value} is too small; give at least {minimum}")
        for name, valid in (("capacity", "at least 1"), ("capacity_factor", "more than 0")):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} {value:g} must be {valid}; remove it to drop no tokens")
        return self

    @model_validator(mode="after")
    def _check_routing(self) -> ExpertsShape:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k {self.top_k} is more than num_experts {self.num_experts}; "
                f"lower top_k to {self.num_experts} or raise num_experts"
            )
        if self.capacity is not None and self.capacity_factor is not None:
            raise ValueError(
                f"capacity {self.capacity} and capacity_factor {self.capacity_factor:g} both set an expert's capacity; "
                "keep one"
            )
        if self.shared_size is not None and not self.num_shared:
            raise ValueError(
                f"shared_size {self.shared_size} has no effect without shared experts; set num_shared, or remove it"
            )
        if self.spiking is not None and self.router != "spiking":
            raise ValueError(
                f"spiking is set but router is {self.router!r}; set router to 'spiking', or remove spiking"
            )
        return self

    @property
    def renormalises(self) -> bool:
        """Whether the gates of the chosen experts are normalised to sum to 1."""
        return self.top_k > 1 if self.renormalise is None else self.renormalise

    @property
    def shared_width(self) -> int:
        """Width of all shared experts together, which are computed as one MLP."""
        return self.num_shared * (self.shared_size or self.expert_size)

    @property
    def has_capacity_limit(self) -> bool:
        """Whether experts have a limited capacity in training."""
        return self.capacity is not None or self.capacity_factor is not None

    @property
    def spiking_units(self) -> SpikingShape | None:
        """The units of a spiking router; None for a linear one."""
        return (self.spiking or SpikingShape()) if self.router == "spiking" else None

    def capacity_for(self, tokens: int) -> int:
        """Return the number of choices that an expert takes from a group of `tokens`."""
        if self.capacity is not None:
            return self.capacity
        assert self.capacity_factor is not None
        # 1.1 * 10 is 11.000000000000002, whose ceiling must be 11.
        return math.ceil(self.capacity_factor * self.top_k * tokens / self.num_experts - 1e-6)

    def num_parameters(self) -> int:
        """Return the exact number of parameters."""
        return (
            self._count_router_parameters()
            + self.num_experts * self._count_expert_parameters(self.expert_size)
            + self._count_expert_parameters(self.shared_width)
        )

    def num_active_parameters(self) -> int:
        """Return the number of parameters used for one token."""
        return (
            self._count_router_parameters()
            + self.top_k * self._count_expert_parameters(self.expert_size)
            + self._count_expert_parameters(self.shared_width)
        )

    def _count_expert_parameters(self, size: int) -> int:
        return (3 if self.activation == "swiglu" else 2) * self.hidden_size * size

    def _count_router_parameters(self) -> int:
        if self.router == "linear":
            return self.num_experts * self.hidden_size
        return self.num_experts * SPIKING_UNITS_PER_EXPERT * (self.hidden_size + 1)
