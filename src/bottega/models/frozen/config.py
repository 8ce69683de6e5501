"""What is frozen, in which precision, and what is trained between."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FrozenPrecision = Literal["auto", "fp32", "bf16", "fp16", "8bit", "4bit"]


class SoftPromptShape(BaseModel):
    """All that decides the tensors that are trained; everything else is frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(gt=0)
    """Of the language model."""
    num_layers: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_size: int = Field(gt=0)
    text_size: int = Field(gt=0)
    """Width of a text token of the image generator."""
    num_image_tokens: int = Field(gt=0)
    num_prefix_tokens: int = Field(ge=0)
    projection: int | None = Field(None, gt=0)
    """Width of the layers that prefixes come out of (P-tuning v2); None where they are parameters themselves."""

    @property
    def num_parameters(self) -> int:
        """How many there must be. LLaMA-7B, width 768 and two of each: 3,678,976."""
        tokens = self.num_image_tokens * self.hidden_size
        mapping = (self.hidden_size + 1) * self.text_size
        each = self.num_layers * 2 * self.num_kv_heads * self.head_size
        if self.projection is None or not self.num_prefix_tokens:
            return tokens + mapping + self.num_prefix_tokens * each
        inner = self.num_prefix_tokens * self.hidden_size + (self.hidden_size + 1) * self.projection
        return tokens + mapping + inner + (self.projection + 1) * each
