"""Sizes and cost of a classifier that routes samples between experts, without importing torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from bottega.config.section import Activation
from bottega.models.experts.config import ExpertsShape
from bottega.models.spiking.config import SpikingShape
from bottega.models.ssm.config import SSMShape


class RoutingShape(BaseModel):
    """Sizes of the model. Models of equal shapes have interchangeable checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_inputs: int = Field(gt=0)
    num_labels: int = Field(gt=1)
    hidden_size: int = Field(256, gt=0)
    num_layers: int = Field(2, ge=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    trunk: Literal["perceptron", "spiking", "state_space"] = "perceptron"
    activation: Activation = "silu"
    """Activation of the layers of a perceptron trunk."""
    experts: ExpertsShape
    spiking: SpikingShape | None = None
    """Units of a spiking trunk."""
    ssm: SSMShape | None = None
    token_size: int = Field(10, gt=0)
    """Inputs per token of a state-space trunk; the last token is padded with zeros."""

    @property
    def num_units(self) -> int:
        """Number of spiking units of the trunk."""
        return self.num_layers * self.hidden_size if self.trunk == "spiking" else 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a state-space trunk."""
        return -(-self.num_inputs // self.token_size)

    def flops_per_sample(self) -> int:
        """Return the FLOPs of the forward: 2 per weight that is used, counting the active experts only."""
        width = self.hidden_size
        if self.spiking is not None:
            # The current of the first layer is the same in every step, so it is computed once.
            input_weights = self.num_inputs * width
            trunk_weights = (self.num_layers - 1) * width * width * self.spiking.time_steps
        elif self.ssm is not None:
            input_weights = self.num_tokens * self.token_size * width
            trunk_weights = self.num_layers * self.num_tokens * self.ssm.flops_per_token() // 6
        else:
            input_weights, trunk_weights = self.num_inputs * width, self.num_layers * 2 * width * width
        # A single expert has no router.
        router = width if self.experts.num_experts == 1 else 0
        return 2 * (
            input_weights + trunk_weights + self.experts.num_active_parameters() - router + width * self.num_labels
        )
