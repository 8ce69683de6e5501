"""Latents of a frozen autoencoder for latent diffusion, scaled to unit variance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from bottega.core.model_spec import ModelSpec
from bottega.models.autoencoder.config import AutoencoderShape
from bottega.models.autoencoder.layout import read_autoencoder_shape

PRECOMPUTED = "latent"
"""Batch field of precomputed latents: mean and log variance, concatenated (b, *grid, 2 * channels)."""
MAX_POSITIONS = 1 << 22
"""Number of positions of the data that are encoded at once: 64 images of 256 x 256, whose widest layer then holds 2 GiB."""


class Latents(BaseModel):
    """A frozen autoencoder (a run's or an AutoencoderKL of diffusers) and the factor that gives its latents variance 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    scale: float = 1.0
    shift: float = 0.0

    def spec(self) -> ModelSpec:
        """Return how the frozen autoencoder is loaded."""
        return ModelSpec(
            "bottega.models.autoencoder.{framework}:Autoencoder",
            read_autoencoder_shape(Path(self.folder)),
            pretrained=self.folder,
            load="bottega.models.autoencoder.{framework}:load_weights",
            is_filled=True,
        )


def count_positions(shape: AutoencoderShape, latent_grid: Sequence[int]) -> int:
    """Return the number of positions of one decoded sample."""
    factors = [shape.downsample] * len(latent_grid)
    if shape.dims == 3:
        factors[0] = shape.temporal_downsample
    return math.prod(latent_grid) * math.prod(factors)


def split_rows(num_rows: int, num_positions: int) -> list[slice]:
    """Return chunks of rows with at most MAX_POSITIONS positions, or of one row; `num_positions` is that of a row."""
    size = max(1, MAX_POSITIONS // num_positions)
    return [slice(start, start + size) for start in range(0, num_rows, size)]
