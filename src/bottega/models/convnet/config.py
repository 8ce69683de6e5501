"""Dimensions of the convolutional classifier, and the strides of its stages; no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

MIN_STRIDED_SIDE = 8
"""Shorter sides are not strided: a window of 3 covers nearly all of 4 positions already."""
MIN_STEM_STRIDED_SIDE = 32
"""Sides from this length are strided in the stem; the first stage would otherwise cost more than all others together."""
MAX_WIDTH_FACTOR = 4
"""Ratio of the widest stage to the first."""
MAX_GROUPS = 8
"""Groups of a group norm, if their number divides the channels."""


class ConvNetShape(BaseModel):
    """Dimensions of the model. Two equal shapes have interchangeable checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grid: tuple[int, ...] = Field(min_length=2, max_length=3)
    """Sides of a sample without its channels: (height, width), (time, bands) or (frames, height, width)."""
    channels: int = Field(gt=0)
    num_labels: int = Field(gt=1)
    hidden_size: int = Field(32, gt=0)
    num_layers: int = Field(1, gt=0)
    dropout: float = Field(0.1, ge=0, lt=1)

    @property
    def stem_strides(self) -> tuple[int, ...]:
        """The strides of the first convolution."""
        return tuple(2 if side >= MIN_STEM_STRIDED_SIDE else 1 for side in self.grid)

    @property
    def stage_strides(self) -> tuple[tuple[int, ...], ...]:
        """The strides at the beginning of each stage; stages are added until every side is shorter than MIN_STRIDED_SIDE."""
        sides = _divide_sides(self.grid, self.stem_strides)
        strides: list[tuple[int, ...]] = [(1,) * len(sides)]
        while max(sides) >= MIN_STRIDED_SIDE:
            strides.append(tuple(2 if side >= MIN_STRIDED_SIDE else 1 for side in sides))
            sides = _divide_sides(sides, strides[-1])
        return tuple(strides)

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each stage."""
        return tuple(self.hidden_size * min(MAX_WIDTH_FACTOR, 2**stage) for stage in range(len(self.stage_strides)))

    @property
    def num_blocks(self) -> int:
        """Residual blocks of all stages."""
        return self.num_layers * len(self.stage_strides)

    @property
    def num_features(self) -> int:
        """Width of the last stage."""
        return self.widths[-1]


def _divide_sides(sides: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-side // stride) for side, stride in zip(sides, strides, strict=True))
