"""Precisions of frozen models, and the dimensions of trained soft prompts; no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FrozenPrecision = Literal["auto", "fp32", "bf16", "fp16", "8bit", "4bit"]


class SoftPromptShape(BaseModel):
    """Dimensions of the trained tensors: image tokens, prefixes and the mapping to the image generator."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(gt=0)
    """Hidden size of the language model."""
    num_layers: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_size: int = Field(gt=0)
    text_size: int = Field(gt=0)
    """Width of a text token of the image generator."""
    num_image_tokens: int = Field(gt=0)
    num_prefix_tokens: int = Field(ge=0)
    projection: int | None = Field(None, gt=0)
    """Hidden width of the MLP that computes prefixes (P-tuning v2); None if the prefixes are parameters themselves."""

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters. With LLaMA-7B, text width 768, two image and two prefix tokens: 3,678,976."""
        tokens = self.num_image_tokens * self.hidden_size
        mapping = (self.hidden_size + 1) * self.text_size
        kv_size = self.num_layers * 2 * self.num_kv_heads * self.head_size
        if self.projection is None or not self.num_prefix_tokens:
            return tokens + mapping + self.num_prefix_tokens * kv_size
        inner = self.num_prefix_tokens * self.hidden_size + (self.hidden_size + 1) * self.projection
        return tokens + mapping + inner + (self.projection + 1) * kv_size
