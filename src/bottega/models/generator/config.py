"""The exact shape of a generator, which decides its tensors; no torch."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bottega.models.decoder.config import TransformerShape

MAX_TOKENS = 1 << 18
"""Patches of one sample: a minute of large video has about as many. More is a slip, and would compute for days."""
Condition = Literal["none", "class", "vector", "text"]


class DiTShape(BaseModel):
    """All that decides the tensors of a diffusion transformer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grid: tuple[int, ...] = Field(min_length=1, max_length=3)
    """Sides of a sample without its channels: (height, width), (time, bands), (frames, height, width), (time,)."""
    channels: int = Field(gt=0)
    patch: tuple[int, ...]
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    context_size: int | None = None
    """Width of the text tokens it looks at; None where there are none."""
    attention: Literal["full", "factorised"] = "full"
    dropout: float = Field(0.0, ge=0, lt=1)

    @model_validator(mode="after")
    def _fits(self) -> DiTShape:
        if len(self.patch) != len(self.grid):
            raise ValueError(f"a patch of {len(self.patch)} sides for a sample of {len(self.grid)}")
        wrong = [axis for axis, (side, part) in enumerate(zip(self.grid, self.patch, strict=True)) if side % part]
        if wrong:
            side, part = self.grid[wrong[0]], self.patch[wrong[0]]
            key = "temporal_patch_size" if len(self.grid) == 3 and wrong[0] == 0 else "patch_size"
            fits = ", ".join(str(n) for n in range(1, side + 1) if side % n == 0)
            raise ValueError(
                f"{key}: patches of {part} do not divide a side of {side} (of {_sides(self.grid)}); {fits} do"
            )
        if math.prod(self.tokens) > MAX_TOKENS:
            raise ValueError(
                f"patch_size: a sample of {_sides(self.grid)} is {math.prod(self.tokens):,} patches, and {MAX_TOKENS:,} "
                "is the most; make the sample smaller, or the patches larger"
            )
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size: {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        return self

    @property
    def tokens(self) -> tuple[int, ...]:
        """Patches in each direction."""
        return tuple(side // part for side, part in zip(self.grid, self.patch, strict=True))


class UNetShape(BaseModel):
    """All that decides the tensors of diffusers' UNet, as we build it from scratch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grid: tuple[int, int]
    channels: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    stages: int = Field(gt=0)
    context_size: int | None = None
    has_vector: bool = False
    """Whether a condition of one vector is added to the time."""
    config: str | None = None
    """The JSON of a folder's own configuration, in place of the above."""


class CodesBackbone(BaseModel):
    """A language model over the codes of samples with these sides; its vocabulary is the codes, the classes, and one
    token for none of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grid: tuple[int, ...]
    channels: int = Field(gt=0)
    codes: tuple[int, ...]
    """Sides of the grid of codes."""
    num_codes: int = Field(gt=1)
    transformer: TransformerShape

    @property
    def length(self) -> int:
        """Codes of a sample."""
        return math.prod(self.codes)


class ConditionShape(BaseModel):
    """What a sample may be asked for, and how wide the answer is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Condition
    size: int = 0
    """Classes, or the width of the vector."""
    shared: tuple[tuple[int, ...], ...] = ()
    """Class -> rows of a second table, one for each of its attributes; empty where classes have nothing in common."""
    hidden_size: int = 0
    """Width of what the backbone is handed."""
    vocab_size: int | None = None
    """Text: of our own encoder; None is one from a folder."""
    text_size: int = 0
    text_layers: int = 0
    max_tokens: int = 0


class GeneratorShape(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    backbone: DiTShape | UNetShape
    condition: ConditionShape

    @property
    def sample(self) -> tuple[int, ...]:
        """Sides and channels of what is generated."""
        return (*self.backbone.grid, self.backbone.channels)


class CodeGeneratorShape(BaseModel):
    """A language model over codes, and what it may be asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backbone: CodesBackbone
    condition: ConditionShape

    @property
    def sample(self) -> tuple[int, ...]:
        """Sides and channels of the data, which codes are decoded to."""
        return (*self.backbone.grid, self.backbone.channels)


def _sides(grid: tuple[int, ...]) -> str:
    return " x ".join(map(str, grid))
