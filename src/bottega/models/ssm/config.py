"""The dimensions of a state-space layer (Mamba-2, Dao & Gu 2024), and what it costs; no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SSMShape(BaseModel):
    """All that decides the tensors of the layer, and `chunk_size`, which decides only how fast they are used."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(gt=0)
    expand: int = Field(2, gt=0)
    """The layer works on `expand * hidden_size` channels."""
    head_size: int = Field(64, gt=0)
    """Channels that decay together."""
    state_size: int = Field(64, gt=0)
    """Numbers kept of each channel: all that is known of what was read."""
    num_groups: int = Field(1, gt=0)
    """Heads of one group write and read their states by the same B and C."""
    conv_size: int = Field(4, gt=0)
    chunk_size: int = Field(64, gt=0)
    norm_epsilon: float = Field(1e-5, gt=0.0)
    time_step_min: float = Field(1e-3, gt=0.0)
    time_step_max: float = Field(0.1, gt=0.0)

    @model_validator(mode="after")
    def _heads_agree(self) -> SSMShape:
        if self.inner_size % self.head_size:
            raise ValueError(
                f"head_size {self.head_size} does not divide the {self.inner_size} channels (hidden_size "
                f"{self.hidden_size} x expand {self.expand}); try head_size {_divisor_near(self.inner_size, self.head_size)}"
            )
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"num_groups {self.num_groups} does not divide the {self.num_heads} heads of the state-space layer; "
                f"try num_groups {_divisor_near(self.num_heads, self.num_groups)}"
            )
        if self.time_step_min > self.time_step_max:
            raise ValueError(
                f"time_step_min {self.time_step_min:g} is above time_step_max {self.time_step_max:g}; exchange them"
            )
        return self

    @property
    def inner_size(self) -> int:
        return self.expand * self.hidden_size

    @property
    def num_heads(self) -> int:
        return self.inner_size // self.head_size

    @property
    def conv_channels(self) -> int:
        """What passes the convolution: the inputs, and B and C of each group."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def state_numbers(self) -> int:
        """Numbers that one sequence keeps in one layer, however long it is."""
        return self.inner_size * self.state_size + self.conv_channels * (self.conv_size - 1)

    def num_parameters(self) -> int:
        """The exact number of parameters of one layer."""
        convolution = self.conv_channels * (self.conv_size + 1)
        return self._projections() + convolution + 3 * self.num_heads + self.inner_size

    def flops_per_token(self) -> int:
        """Forward and backward of one layer: 6 per weight that is multiplied, and the products of the scan, which do not
        depend on the length: scores within a chunk, their use, and the states that are written and read."""
        chunk = self.chunk_size * (self.num_groups * self.state_size + self.inner_size)
        return 6 * (
            self._projections() + self.conv_channels * self.conv_size + chunk + 2 * self.inner_size * self.state_size
        )

    def _projections(self) -> int:
        read = self.hidden_size * (self.inner_size + self.conv_channels + self.num_heads)
        return read + self.inner_size * self.hidden_size


def _divisor_near(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - wanted))
