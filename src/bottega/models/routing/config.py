"""The dimensions of a model that routes samples between experts, and what an answer of it costs; no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from bottega.config.section import Activation
from bottega.models.experts.config import ExpertsShape
from bottega.models.spiking.config import SpikingShape
from bottega.models.ssm.config import SSMShape


class RoutingShape(BaseModel):
    """All that decides the tensors of the model. Two equal shapes have interchangeable checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_inputs: int = Field(gt=0)
    num_labels: int = Field(gt=1)
    hidden_size: int = Field(256, gt=0)
    num_layers: int = Field(2, ge=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    trunk: Literal["perceptron", "spiking", "state_space"] = "perceptron"
    activation: Activation = "silu"
    """Inside the layers of a perceptron trunk."""
    experts: ExpertsShape
    spiking: SpikingShape | None = None
    """Of the units of a spiking trunk."""
    ssm: SSMShape | None = None
    token_size: int = Field(10, gt=0)
    """Of a trunk of state spaces: inputs of a token, of which the last is filled up with zeros."""

    @property
    def num_units(self) -> int:
        """Spiking units of the trunk."""
        return self.num_layers * self.hidden_size if self.trunk == "spiking" else 0

    @property
    def num_tokens(self) -> int:
        return -(-self.num_inputs // self.token_size)

    def flops_per_sample(self) -> int:
        """Forward: 2 for each weight that a sample is multiplied with; of the experts those that it is sent to."""
        width = self.hidden_size
        if self.spiking is not None:
            first = self.num_inputs * width  # its current is the same in every step
            inner = (self.num_layers - 1) * width * width * self.spiking.time_steps
        elif self.ssm is not None:
            first = self.num_tokens * self.token_size * width
            inner = self.num_layers * self.num_tokens * self.ssm.flops_per_token() // 6
        else:
            first, inner = self.num_inputs * width, self.num_layers * 2 * width * width
        # A single expert is asked without a router.
        router = width if self.experts.num_experts == 1 else 0
        return 2 * (first + inner + self.experts.num_active_parameters() - router + width * self.num_labels)
