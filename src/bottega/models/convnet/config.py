"""The dimensions of the convolutional classifier, and how its stages shrink a sample; no torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

SMALLEST_HALVED = 8
"""A side shorter than this stays as it is: of 4 positions a window of 3 sees nearly all already."""
SMALLEST_HALVED_FIRST = 32
"""A side of at least this is halved before the first stage, which would else cost more than all others together."""
WIDEST = 4
"""The last stage is at most so many times as wide as the first."""


class ConvNetShape(BaseModel):
    """All that decides the tensors of the model. Two equal shapes have interchangeable checkpoints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grid: tuple[int, ...] = Field(min_length=2, max_length=3)
    """Sides of a sample without its channels: (height, width), (time, bands) or (frames, height, width)."""
    channels: int = Field(gt=0)
    num_labels: int = Field(gt=1)
    hidden_size: int = Field(32, gt=0)
    num_layers: int = Field(1, gt=0)
    dropout: float = Field(0.1, ge=0, lt=1)

    @property
    def stem(self) -> tuple[int, ...]:
        """The strides of the first convolution."""
        return tuple(2 if side >= SMALLEST_HALVED_FIRST else 1 for side in self.grid)

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The strides at the beginning of each stage; there are as many as it takes to make every side short."""
        sides = _halved(self.grid, self.stem)
        found: list[tuple[int, ...]] = [(1,) * len(sides)]
        while max(sides) >= SMALLEST_HALVED:
            found.append(tuple(2 if side >= SMALLEST_HALVED else 1 for side in sides))
            sides = _halved(sides, found[-1])
        return tuple(found)

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each stage."""
        return tuple(self.hidden_size * min(WIDEST, 2**stage) for stage in range(len(self.stages)))

    @property
    def num_features(self) -> int:
        return self.widths[-1]


def _halved(sides: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-side // stride) for side, stride in zip(sides, strides, strict=True))
