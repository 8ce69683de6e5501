"""Dimensions of generators: backbone and condition; no torch."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bottega.models.decoder.config import TransformerShape

MAX_TOKENS = 1 << 18
"""Maximum number of patches of one sample, about a minute of large video; more is a mistake and would take days."""
TIME_EMBEDDING_SIZE = 256
"""Width of a diffusion transformer's sinusoidal time embedding."""
EPSILON = 1e-6
"""Of the norms of a diffusion transformer."""
TEXT_HEAD_SIZE = 32
Condition = Literal["none", "class", "vector", "text"]


class DiTShape(BaseModel):
    """Dimensions of a diffusion transformer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grid: tuple[int, ...] = Field(min_length=1, max_length=3)
    """Sides of a sample without its channels: (height, width), (time, bands), (frames, height, width), (time,)."""
    channels: int = Field(gt=0)
    patch: tuple[int, ...]
    """Sides of a patch, one for each side of the grid."""
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    context_size: int | None = None
    """Width of the text tokens; None without text."""
    attention: Literal["full", "factorised"] = "full"
    dropout: float = Field(0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _check_dimensions(self) -> DiTShape:
        if len(self.patch) != len(self.grid):
            raise ValueError(
                f"patch: has length {len(self.patch)}, but grid has length {len(self.grid)}; "
                "give one side of the patch for each side of the grid"
            )
        undivided_axes = [
            axis for axis, (side, patch_side) in enumerate(zip(self.grid, self.patch, strict=True)) if side % patch_side
        ]
        if undivided_axes:
            side, patch_side = self.grid[undivided_axes[0]], self.patch[undivided_axes[0]]
            key = "temporal_patch_size" if len(self.grid) == 3 and undivided_axes[0] == 0 else "patch_size"
            divisors = ", ".join(str(n) for n in range(1, side + 1) if side % n == 0)
            raise ValueError(
                f"{key}: patches of {patch_side} do not divide a side of {side} (of {_format_sides(self.grid)}); "
                f"use one of {divisors}"
            )
        if math.prod(self.tokens) > MAX_TOKENS:
            raise ValueError(
                f"patch_size: a sample of {_format_sides(self.grid)} has {math.prod(self.tokens):,} patches, more than the limit of "
                f"{MAX_TOKENS:,}; make the sample smaller, or the patches larger"
            )
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size: {self.hidden_size} is not a multiple of num_heads {self.num_heads}; change one of them"
            )
        return self

    @property
    def tokens(self) -> tuple[int, ...]:
        """Number of patches in each dimension."""
        return tuple(side // patch_side for side, patch_side in zip(self.grid, self.patch, strict=True))


class UNetShape(BaseModel):
    """Dimensions of diffusers' UNet, built from scratch or from a folder's configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grid: tuple[int, int]
    channels: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    stages: int = Field(gt=0)
    context_size: int | None = None
    has_vector: bool = False
    """Whether a condition vector is added to the time embedding."""
    config: str | None = None
    """The JSON of a folder's configuration, in place of the sizes above."""


class CodesBackbone(BaseModel):
    """A language model over the codes of samples; its vocabulary is the codes, the classes, and one token for no class."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grid: tuple[int, ...]
    channels: int = Field(gt=0)
    codes: tuple[int, ...]
    """Sides of the code grid."""
    num_codes: int = Field(gt=1)
    transformer: TransformerShape

    @property
    def length(self) -> int:
        """Number of codes of a sample."""
        return math.prod(self.codes)


class ConditionShape(BaseModel):
    """Kind and width of a generator's condition."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Condition
    size: int = 0
    """Number of classes, or the width of the vector."""
    shared: tuple[tuple[int, ...], ...] = ()
    """For each class, the rows of a shared embedding table, one per attribute; empty without shared attributes."""
    hidden_size: int = 0
    """Width of the condition vector of the backbone."""
    vocab_size: int | None = None
    """Vocabulary of our own text encoder; None for an encoder from a folder."""
    text_size: int = 0
    text_layers: int = 0
    max_tokens: int = 0

    @property
    def num_text_heads(self) -> int:
        """Attention heads of our own text encoder: the largest number up to one for TEXT_HEAD_SIZE channels that divides them."""
        width = self.text_size
        return next(n for n in range(max(1, width // TEXT_HEAD_SIZE), 0, -1) if width % n == 0)

    @property
    def null_row(self) -> int:
        """Row of the shared table that stands for no class, its last."""
        return max(row for rows in self.shared for row in rows) + 1

    @property
    def shared_rows(self) -> list[list[int]]:
        """For each class, and at the end for no class, the rows of the shared table."""
        return [*map(list, self.shared), [self.null_row] * len(self.shared[0])]


class GeneratorShape(BaseModel):
    """Dimensions of a generator with a diffusion backbone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backbone: DiTShape | UNetShape
    condition: ConditionShape

    @property
    def sample(self) -> tuple[int, ...]:
        """Sides and channels of generated samples."""
        return (*self.backbone.grid, self.backbone.channels)


class CodeGeneratorShape(BaseModel):
    """Dimensions of a language model over codes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backbone: CodesBackbone
    condition: ConditionShape

    @property
    def sample(self) -> tuple[int, ...]:
        """Sides and channels of decoded samples."""
        return (*self.backbone.grid, self.backbone.channels)


def _format_sides(grid: tuple[int, ...]) -> str:
    return " x ".join(map(str, grid))
