"""The dimensions of an autoencoder, continuous or with codes, and the shape of its latents; no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bottega.core.errors import UsageError

SIDES = {1: ("length",), 2: ("height", "width"), 3: ("frames", "height", "width")}


class AutoencoderShape(BaseModel):
    """All that decides the tensors of the model, and how its latents are to be used.

    Data is [B, *grid, channels], latents are [B, *smaller grid, latent_channels]. A stage halves the sides, except the
    last; of `frames`, only the last stages do, as many as `temporal_downsample` asks for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dims: Literal[1, 2, 3] = 2
    channels: int = Field(gt=0)
    latent_channels: int = Field(gt=0)
    widths: tuple[int, ...] = Field(min_length=1)
    """Channels of each stage, the one at full size first."""
    layers_per_block: int = Field(default=2, gt=0)
    norm_groups: int = Field(default=32, gt=0)
    """At most so many; `groups` is what divides every width."""
    causal_time: bool = False
    """Frames see earlier frames alone, and the first has a latent to itself: 1 + k n frames become 1 + n."""
    temporal_downsample: int = Field(default=1, gt=0)
    mid_attention: bool = True
    quant_conv: bool = True
    """A 1 x 1 convolution on either side of the latents, which newer published models leave out."""
    scaling_factor: float = Field(default=1.0, gt=0.0)
    """A generator is meant to see (latents - shift_factor) * scaling_factor; encode and decode do neither."""
    shift_factor: float = 0.0

    @model_validator(mode="after")
    def _axes_agree(self) -> AutoencoderShape:
        if any(width <= 0 for width in self.widths):
            raise ValueError(f"widths {list(self.widths)}: every stage needs at least one channel")
        if self.dims != 3 and (self.causal_time or self.temporal_downsample != 1):
            raise ValueError(f"causal_time and temporal_downsample are about frames, and dims {self.dims} has none")
        times = self.temporal_downsample
        if times & (times - 1) or times > self.downsample:
            raise ValueError(
                f"temporal_downsample {times} must be a power of two up to {self.downsample}, "
                f"which is what {len(self.widths)} widths can do"
            )
        return self

    @property
    def downsample(self) -> int:
        """How much smaller the sides of the latents are; frames have a number of their own."""
        return 2 ** (len(self.widths) - 1)

    @property
    def groups(self) -> int:
        """One count for all norms, as published configs have one: the largest up to norm_groups that divides all."""
        common = math.gcd(*self.widths)
        return max(g for g in range(1, min(self.norm_groups, common) + 1) if common % g == 0)

    def strides(self, stage: int) -> tuple[int, ...]:
        """By how much each axis shrinks after a stage, and grows before it on the way back."""
        halvings = len(self.widths) - 1
        if stage >= halvings:
            return (1,) * self.dims
        if self.dims < 3:
            return (2,) * self.dims
        return (2 if stage >= halvings - int(math.log2(self.temporal_downsample)) else 1, 2, 2)

    def latent_grid(self, grid: Sequence[int]) -> tuple[int, ...]:
        """The sides of the latents of data with these sides; those that cannot be halved so often are an error."""
        names = SIDES[self.dims]
        if len(grid) != self.dims:
            raise UsageError(f"an autoencoder over {', '.join(names)} got data with the sides {list(grid)}")
        factors = [self.temporal_downsample if name == "frames" else self.downsample for name in names]
        # The first frame stands alone in causal time, so it is the others that are counted in steps.
        alone = [int(self.causal_time and name == "frames") for name in names]
        wrong = [
            f"{name} {side} ({_allowed(factor, one)}, such as {one + max(1 - one, -(-(side - one) // factor)) * factor})"
            for name, side, factor, one in zip(names, grid, factors, alone, strict=True)
            if side <= 0 or (side - one) % factor
        ]
        if wrong:
            raise UsageError(f"sides that the autoencoder cannot shrink: {', '.join(wrong)}; resize or crop the data")
        return tuple(one + (side - one) // factor for side, factor, one in zip(grid, factors, alone, strict=True))

    def latent_shape(self, grid: Sequence[int]) -> tuple[int, ...]:
        return (*self.latent_grid(grid), self.latent_channels)


def _allowed(factor: int, alone: int) -> str:
    return f"1 more than a multiple of {factor}" if alone else f"a multiple of {factor}"


class CodesShape(BaseModel):
    """An autoencoder whose latents are codes: give `levels` (finite scalars) or `codebook_size` (learned vectors)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    autoencoder: AutoencoderShape
    """Its latent_channels are the numbers behind a code: one for each level, or the size of a learned vector."""
    levels: tuple[int, ...] | None = None
    codebook_size: int | None = Field(default=None, gt=1)

    @model_validator(mode="after")
    def _one_quantiser(self) -> CodesShape:
        if (self.levels is None) == (self.codebook_size is None):
            raise ValueError("give either levels, such as [8, 5, 5, 5], or codebook_size, such as 1024")
        if self.levels is not None:
            # Beyond 255 the margin that keeps the ends of a scale reachable would be worth a level of its own.
            if not self.levels or not all(2 <= level <= 255 for level in self.levels):
                raise ValueError(f"levels {list(self.levels)}: each is between 2 and 255")
            if self.autoencoder.latent_channels != len(self.levels):
                raise ValueError(
                    f"latent_channels {self.autoencoder.latent_channels} with {len(self.levels)} levels: "
                    f"each level is one channel; set latent_channels to {len(self.levels)}"
                )
        return self

    @property
    def num_codes(self) -> int:
        return math.prod(self.levels) if self.levels is not None else int(self.codebook_size or 0)


def stage_widths(hidden_size: int, downsample: int) -> tuple[int, ...]:
    """Widths that double until four times the first: with 128 and 8, those of Stable Diffusion's autoencoder."""
    if downsample < 1 or downsample & (downsample - 1):
        raise UsageError(f"model.downsample: {downsample} is no power of two; try 4, 8 or 16")
    return tuple(hidden_size * min(2**stage, 4) for stage in range(downsample.bit_length()))
