"""Sizes and cost of a state-space layer (Mamba-2, Dao & Gu 2024), without importing torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SSMShape(BaseModel):
    """Sizes of the layer, and `chunk_size`, which affects only its speed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(gt=0)
    expand: int = Field(2, gt=0)
    """The layer works on `expand * hidden_size` channels."""
    head_size: int = Field(64, gt=0)
    """Channels of a head, which have one decay rate."""
    state_size: int = Field(64, gt=0)
    """Size of the recurrent state of each channel."""
    num_groups: int = Field(1, gt=0)
    """Groups of heads that share B and C."""
    conv_size: int = Field(4, gt=0)
    chunk_size: int = Field(64, gt=0)
    norm_epsilon: float = Field(1e-5, gt=0.0)
    time_step_min: float = Field(1e-3, gt=0.0)
    time_step_max: float = Field(0.1, gt=0.0)

    @model_validator(mode="after")
    def _check_sizes(self) -> SSMShape:
        if self.inner_size % self.head_size:
            raise ValueError(
                f"head_size {self.head_size} does not divide the {self.inner_size} channels (hidden_size "
                f"{self.hidden_size} x expand {self.expand}); try head_size {_nearest_divisor(self.inner_size, self.head_size)}"
            )
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"num_groups {self.num_groups} does not divide the {self.num_heads} heads of the state-space layer; "
                f"try num_groups {_nearest_divisor(self.num_heads, self.num_groups)}"
            )
        if self.time_step_min > self.time_step_max:
            raise ValueError(
                f"time_step_min {self.time_step_min:g} is above time_step_max {self.time_step_max:g}; swap the two"
            )
        return self

    @property
    def inner_size(self) -> int:
        """Width of the state-space layer."""
        return self.expand * self.hidden_size

    @property
    def num_heads(self) -> int:
        return self.inner_size // self.head_size

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: the inputs, and B and C of each group."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def num_state_values(self) -> int:
        """Number of values in the state of one sequence and layer, at any length."""
        return self.inner_size * self.state_size + self.conv_channels * (self.conv_size - 1)

    def num_parameters(self) -> int:
        """Return the exact number of parameters of one layer."""
        convolution = self.conv_channels * (self.conv_size + 1)
        return self._count_projection_weights() + convolution + 3 * self.num_heads + self.inner_size

    def flops_per_token(self) -> int:
        """Return the FLOPs per token of one layer, forward and backward, which do not depend on the sequence length.

        6 per weight, plus the products of the scan: scores and outputs within a chunk, and writing and reading states.
        """
        chunk_products = self.chunk_size * (self.num_groups * self.state_size + self.inner_size)
        return 6 * (
            self._count_projection_weights()
            + self.conv_channels * self.conv_size
            + chunk_products
            + 2 * self.inner_size * self.state_size
        )

    def _count_projection_weights(self) -> int:
        input_weights = self.hidden_size * (self.inner_size + self.conv_channels + self.num_heads)
        return input_weights + self.inner_size * self.hidden_size


def _nearest_divisor(number: int, target: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - target))
