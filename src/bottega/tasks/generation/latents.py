"""Generation in the latents of a frozen autoencoder: smaller, smoother, and scaled to the size noise has."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from bottega.core.model_spec import ModelSpec
from bottega.core.noise import Noise
from bottega.core.types import Batch
from bottega.models.autoencoder.vae import Autoencoder
from bottega.tasks.autoencode.vae_task import flatten_bands

PRECOMPUTED = "latent"
"""A batch's field of latents that were computed beforehand: mean and log variance, one after the other [b, g..., 2c]."""
MAX_POSITIONS = 1 << 22
"""Places of the data in one piece: 64 pictures of 256 x 256, whose widest layer then holds 2 GiB."""


class Latents(BaseModel):
    """An autoencoder's folder (ours or diffusers' AutoencoderKL), and the factor that gives its latents variance 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    scale: float = 1.0
    shift: float = 0.0

    def spec(self) -> ModelSpec:
        return ModelSpec("bottega.models.autoencoder.vae:load_autoencoder", Path(self.folder))

    @torch.no_grad()
    def encode(self, vae: Autoencoder, batch: Batch, key: str, rng: Noise) -> Tensor:
        """One draw of the latents of each sample, as the generator is meant to see them."""
        both = batch[PRECOMPUTED].float() if PRECOMPUTED in batch else encode_moments(vae, batch[key])
        mean, log_variance = both.chunk(2, dim=-1)
        noise = rng.normal("latent", tuple(mean.shape[1:]))
        return (mean + (log_variance / 2).exp() * noise - self.shift) * self.scale

    @torch.no_grad()
    def decode(self, vae: Autoencoder, latent: Tensor) -> Tensor:
        return _in_pieces(_decoded(vae), latent / self.scale + self.shift, places=_places(vae, latent))


@torch.no_grad()
def encode_moments(vae: Autoencoder, x: Tensor) -> Tensor:
    """Mean and log variance, one after the other [b, g..., 2c]; in float32 also where training is not, so that what is
    computed beforehand is what would have been computed on the way."""
    x = flatten_bands(x, vae.shape).float()
    return _in_pieces(lambda part: torch.cat(vae.encode(part), dim=-1), x, places=math.prod(x.shape[1:-1]))


@torch.no_grad()
def reconstruct(vae: Autoencoder, x: Tensor) -> Tensor:
    """Data as they come back, without the noise of a draw."""
    mean = encode_moments(vae, x).chunk(2, dim=-1)[0]
    return _in_pieces(_decoded(vae), mean, places=_places(vae, mean))


def _decoded(vae: Autoencoder) -> Callable[[Tensor], Tensor]:
    return lambda latent: vae.decode(latent).float()


def _places(vae: Autoencoder, latent: Tensor) -> int:
    """Of what a latent stands for."""
    factors = [vae.shape.downsample] * len(latent.shape[1:-1])
    if vae.shape.dims == 3:
        factors[0] = vae.shape.temporal_downsample
    return math.prod(latent.shape[1:-1]) * math.prod(factors)


def _in_pieces(compute: Callable[[Tensor], Tensor], x: Tensor, *, places: int) -> Tensor:
    """All rows, as many at once as memory is likely to hold: a batch of small latents may be one of large pictures."""
    size = max(1, MAX_POSITIONS // places)
    with torch.autocast(x.device.type, enabled=False):
        return torch.cat([compute(part) for part in x.split(size)])
