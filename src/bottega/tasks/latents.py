"""Generation in the latents of a frozen autoencoder: smaller, smoother, and scaled to the size noise has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from bottega.core.noise import Noise
from bottega.core.types import Batch

PREPARED = "latent"
"""A batch's field of latents that were computed beforehand: mean and log variance, one after the other [b, g..., 2c]."""


class Latents(BaseModel):
    """An autoencoder's folder (ours or diffusers' AutoencoderKL), and the factor that gives its latents variance 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    scale: float = 1.0
    shift: float = 0.0

    def build(self) -> Any:
        from bottega.models.vae import load_autoencoder

        return load_autoencoder(Path(self.folder))

    @torch.no_grad()
    def encode(self, vae: Any, batch: Batch, key: str, rng: Noise) -> Tensor:
        if PREPARED in batch:
            mean, log_variance = batch[PREPARED].float().chunk(2, dim=-1)
        else:
            mean, log_variance = vae.encode(batch[key])
        noise = rng.normal("latent", tuple(mean.shape[1:]))
        return (mean.float() + (log_variance.float() / 2).exp() * noise - self.shift) * self.scale

    @torch.no_grad()
    def round_trip(self, vae: Any, x: Tensor) -> Tensor:
        return vae.decode(vae.encode(x)[0]).float()

    @torch.no_grad()
    def decode(self, vae: Any, latent: Tensor) -> Tensor:
        return vae.decode(latent / self.scale + self.shift).float()
