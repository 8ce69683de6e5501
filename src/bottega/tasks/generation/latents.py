"""Latents of a frozen autoencoder for latent diffusion, scaled to unit variance."""

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
        return ModelSpec("bottega.models.autoencoder.vae:load_autoencoder", Path(self.folder))

    @torch.no_grad()
    def encode(self, vae: Autoencoder, batch: Batch, key: str, rng: Noise) -> Tensor:
        """Return sampled latents of a batch, scaled as the generator reads them."""
        moments = batch[PRECOMPUTED].float() if PRECOMPUTED in batch else encode_moments(vae, batch[key])
        mean, log_variance = moments.chunk(2, dim=-1)
        noise = rng.normal("latent", tuple(mean.shape[1:]))
        return (mean + (log_variance / 2).exp() * noise - self.shift) * self.scale

    @torch.no_grad()
    def decode(self, vae: Autoencoder, latent: Tensor) -> Tensor:
        """Return samples for scaled latents."""
        return _map_chunks(
            _build_decoder(vae), latent / self.scale + self.shift, num_positions=_count_positions(vae, latent)
        )


@torch.no_grad()
def encode_moments(vae: Autoencoder, x: Tensor) -> Tensor:
    """Return mean and log variance of latents, concatenated (b, *grid, 2 * channels).

    Always in float32, so that precomputed latents equal those computed during training.
    """
    x = flatten_bands(x, vae.shape).float()
    return _map_chunks(lambda chunk: torch.cat(vae.encode(chunk), dim=-1), x, num_positions=math.prod(x.shape[1:-1]))


@torch.no_grad()
def reconstruct(vae: Autoencoder, x: Tensor) -> Tensor:
    """Return the reconstruction of `x` from the means of its latents, without sampling noise."""
    mean = encode_moments(vae, x).chunk(2, dim=-1)[0]
    return _map_chunks(_build_decoder(vae), mean, num_positions=_count_positions(vae, mean))


def _build_decoder(vae: Autoencoder) -> Callable[[Tensor], Tensor]:
    return lambda latent: vae.decode(latent).float()


def _count_positions(vae: Autoencoder, latent: Tensor) -> int:
    """Return the number of positions of one decoded sample."""
    factors = [vae.shape.downsample] * len(latent.shape[1:-1])
    if vae.shape.dims == 3:
        factors[0] = vae.shape.temporal_downsample
    return math.prod(latent.shape[1:-1]) * math.prod(factors)


def _map_chunks(compute: Callable[[Tensor], Tensor], x: Tensor, *, num_positions: int) -> Tensor:
    """Apply `compute` to chunks of rows that fit in memory: a batch of small latents may decode to large images."""
    size = max(1, MAX_POSITIONS // num_positions)
    with torch.autocast(x.device.type, enabled=False):
        return torch.cat([compute(chunk) for chunk in x.split(size)])
