"""Dimensions of autoencoders, continuous and discrete, and the shape of their latents; no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bottega.core.errors import UsageError

LOG_VARIANCE_BOUNDS = (-30.0, 20.0)
"""Bounds in the published models, outside of which exp leaves float32's useful range."""
EPSILON = 1e-6
"""Of the norms."""
SIDE_NAMES = {1: ("length",), 2: ("height", "width"), 3: ("frames", "height", "width")}


class AutoencoderShape(BaseModel):
    """Dimensions of the model, and the scale and shift of its latents.

    Data is (B, *grid, channels), latents are (B, *latent grid, latent_channels). Every stage but the last halves the sides;
    frames are halved only in the last stages, as `temporal_downsample` requires.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dims: Literal[1, 2, 3] = 2
    channels: int = Field(gt=0)
    latent_channels: int = Field(gt=0)
    widths: tuple[int, ...] = Field(min_length=1)
    """Channels of each stage, from full resolution down."""
    layers_per_block: int = Field(default=2, gt=0)
    norm_groups: int = Field(default=32, gt=0)
    """Maximum number of groups; `groups` is the number that divides every width."""
    causal_time: bool = False
    """Frames depend on earlier frames only, and the first has a latent of its own: 1 + k n frames become 1 + n latents,
    where k is `temporal_downsample`."""
    temporal_downsample: int = Field(default=1, gt=0)
    mid_attention: bool = True
    quant_conv: bool = True
    """Whether there is a 1 x 1 convolution on either side of the latents; newer published models have none."""
    scaling_factor: float = Field(default=1.0, gt=0.0)
    """A generator is trained on (latents - shift_factor) * scaling_factor; encode and decode apply neither."""
    shift_factor: float = 0.0

    @model_validator(mode="after")
    def _check_axes(self) -> AutoencoderShape:
        if any(width <= 0 for width in self.widths):
            raise ValueError(f"widths is {list(self.widths)}, but every stage needs at least one channel")
        if self.dims != 3 and (self.causal_time or self.temporal_downsample != 1):
            raise ValueError(f"causal_time and temporal_downsample need frames, but dims {self.dims} has none")
        factor = self.temporal_downsample
        if factor & (factor - 1) or factor > self.downsample:
            raise ValueError(
                f"temporal_downsample {factor} must be a power of two up to {self.downsample}, "
                f"the downsampling of {len(self.widths)} widths"
            )
        return self

    @property
    def downsample(self) -> int:
        """Ratio of data sides to latent sides; for frames the ratio is `temporal_downsample`."""
        return 2 ** (len(self.widths) - 1)

    @property
    def groups(self) -> int:
        """Number of groups of all norms: the largest up to norm_groups that divides every width."""
        common_divisor = math.gcd(*self.widths)
        return max(
            count for count in range(1, min(self.norm_groups, common_divisor) + 1) if common_divisor % count == 0
        )

    def strides(self, stage: int) -> tuple[int, ...]:
        """Return the stride of each axis after a stage of the encoder, and before it in the decoder."""
        num_halvings = len(self.widths) - 1
        if stage >= num_halvings:
            return (1,) * self.dims
        if self.dims < 3:
            return (2,) * self.dims
        return (2 if stage >= num_halvings - int(math.log2(self.temporal_downsample)) else 1, 2, 2)

    def latent_grid(self, grid: Sequence[int]) -> tuple[int, ...]:
        """Return the latent sides for data sides `grid`; raise UsageError if these cannot be halved often enough."""
        names = SIDE_NAMES[self.dims]
        if len(grid) != self.dims:
            raise UsageError(
                f"the autoencoder takes data with {len(names)} sides ({', '.join(names)}), but this data has {len(grid)} "
                f"({', '.join(map(str, grid))}); use an autoencoder for this kind of data"
            )
        factors = [self.temporal_downsample if name == "frames" else self.downsample for name in names]
        # In causal time the first frame is separate, so only the number of the others must be a multiple.
        extras = [int(self.causal_time and name == "frames") for name in names]
        problems = [
            f"{name} {side} (must be {_describe_allowed_sides(factor, extra)}, such as "
            f"{extra + max(1 - extra, -(-(side - extra) // factor)) * factor})"
            for name, side, factor, extra in zip(names, grid, factors, extras, strict=True)
            if side <= 0 or (side - extra) % factor
        ]
        if problems:
            raise UsageError(
                f"sides that the autoencoder cannot shrink: {', '.join(problems)}; resize or crop the data"
            )
        return tuple(
            extra + (side - extra) // factor for side, factor, extra in zip(grid, factors, extras, strict=True)
        )

    def latent_shape(self, grid: Sequence[int]) -> tuple[int, ...]:
        """Return the latent sides and channels for data sides `grid`."""
        return (*self.latent_grid(grid), self.latent_channels)


def count_residual_layers(shape: AutoencoderShape) -> int:
    """Return the number of residual additions in the decoder, the deeper half."""
    return len(shape.widths) * (shape.layers_per_block + 1) + 2 + int(shape.mid_attention)


def _describe_allowed_sides(factor: int, extra: int) -> str:
    return f"1 more than a multiple of {factor}" if extra else f"a multiple of {factor}"


class CodesShape(BaseModel):
    """An autoencoder with discrete latents: set `levels` (FSQ) or `codebook_size` (VQ)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    autoencoder: AutoencoderShape
    """Its latent_channels are the size of a quantized vector: the length of `levels`, or the size of a codebook vector."""
    levels: tuple[int, ...] | None = None
    """Number of levels of each channel."""
    codebook_size: int | None = Field(default=None, gt=1)

    @model_validator(mode="after")
    def _check_quantizer(self) -> CodesShape:
        if (self.levels is None) == (self.codebook_size is None):
            raise ValueError("give either levels, such as [8, 5, 5, 5], or codebook_size, such as 1024")
        if self.levels is not None:
            # Beyond 255 levels the margin that keeps the outermost ones reachable would be as wide as a level.
            if not self.levels or not all(2 <= level <= 255 for level in self.levels):
                raise ValueError(
                    f"levels is {list(self.levels)}; give the number of levels of each channel, between 2 and 255"
                )
            if self.autoencoder.latent_channels != len(self.levels):
                raise ValueError(
                    f"latent_channels is {self.autoencoder.latent_channels}, but levels has {len(self.levels)} numbers, "
                    f"one for each channel; set latent_channels to {len(self.levels)}"
                )
        return self

    @property
    def num_codes(self) -> int:
        """Size of the vocabulary, K."""
        return math.prod(self.levels) if self.levels is not None else int(self.codebook_size or 0)


def stage_widths(hidden_size: int, downsample: int) -> tuple[int, ...]:
    """Return widths that double up to four times the first: with 128 and 8, those of Stable Diffusion's autoencoder."""
    if downsample < 1 or downsample & (downsample - 1):
        raise UsageError(f"model.downsample: {downsample} is not a power of two; try 4, 8 or 16")
    return tuple(hidden_size * min(2**stage, 4) for stage in range(downsample.bit_length()))
