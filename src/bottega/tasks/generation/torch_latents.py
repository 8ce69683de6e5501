"""Latents of a frozen autoencoder in torch: of a batch, of a sample, and there and back."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bottega.core.noise import Noise
from bottega.core.types import Batch
from bottega.models.autoencoder.torch import Autoencoder
from bottega.models.build import build_model
from bottega.models.device import choose_device
from bottega.tasks.autoencode.vae_task import flatten_bands
from bottega.tasks.generation.latents import PRECOMPUTED, Latents, count_positions, split_rows


@torch.no_grad()
def encode_latents(latents: Latents, vae: Autoencoder, batch: Batch, key: str, rng: Noise) -> Tensor:
    """Return sampled latents of a batch, scaled as the generator reads them."""
    moments = batch[PRECOMPUTED].float() if PRECOMPUTED in batch else encode_moments(vae, batch[key])
    mean, log_variance = moments.chunk(2, dim=-1)
    noise = rng.normal("latent", tuple(mean.shape[1:]))
    return (mean + (log_variance / 2).exp() * noise - latents.shift) * latents.scale


@torch.no_grad()
def decode_latents(latents: Latents, vae: Autoencoder, latent: Tensor) -> Tensor:
    """Return samples for scaled latents."""
    return _decode(vae, latent / latents.scale + latents.shift)


def open_encoder(latents: Latents, device: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function from samples of the host to moments, on the device that a recipe names."""
    chosen = choose_device(device)
    # The spec loads the autoencoder's weights, so the seed has no effect.
    vae = build_model(latents.spec(), seed=0).to(chosen).eval()

    def encode(values: np.ndarray) -> np.ndarray:
        moments: np.ndarray = encode_moments(vae, torch.from_numpy(values).to(chosen)).cpu().numpy()
        return moments

    return encode


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
    return _decode(vae, encode_moments(vae, x).chunk(2, dim=-1)[0])


def _decode(vae: Autoencoder, latent: Tensor) -> Tensor:
    num_positions = count_positions(vae.shape, latent.shape[1:-1])
    return _map_chunks(lambda chunk: vae.decode(chunk).float(), latent, num_positions=num_positions)


def _map_chunks(compute: Callable[[Tensor], Tensor], x: Tensor, *, num_positions: int) -> Tensor:
    """Apply `compute` to chunks of rows that fit in memory: a batch of small latents may decode to large images."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.cat([compute(x[rows]) for rows in split_rows(len(x), num_positions)])
