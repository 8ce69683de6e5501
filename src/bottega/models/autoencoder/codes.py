"""An autoencoder whose latents are whole numbers: a quantiser between the encoder and the decoder of models/resnet.py.

B batch   C channels, last outside this file   Z numbers behind a code   K codes   grid: L, or H W, or T H W
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.core.errors import UsageError
from bottega.models.autoencoder.config import CodesShape
from bottega.models.autoencoder.layout import diffusers_config
from bottega.models.autoencoder.resnet import Decoder, Encoder, convolution, to_channels_first
from bottega.models.autoencoder.vae import count_residual_layers
from bottega.models.initial_conv import initialise_convolutional

MARGIN = 1e-3
"""How far beyond the last level a bounded number may reach, so that no finite input is needed to reach it."""


class FiniteScalarQuantizer(nn.Module):
    """Finite scalar quantisation (Mentzer et al., 2023): each channel is rounded to one of its levels.

    Nothing is learned and nothing can die: K is the product of the levels, and a code is its digits in mixed radix. The
    levels are Python numbers, channel by channel: a tensor of them would have to travel to the device at every call.
    """

    def __init__(self, levels: tuple[int, ...]) -> None:
        super().__init__()
        self.levels = levels
        self.basis = tuple(math.prod(levels[:i]) for i in range(len(levels)))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """z [B, *grid, Z] to vectors with z's gradient, codes [B, *grid], and the losses [B] of a codebook: zeros."""
        scaled = torch.stack(
            [_bounded(channel, level) / (level // 2) for channel, level in self._channels(z.float())], dim=-1
        )
        codes = self.codes_of(scaled)
        none = z.new_zeros(len(z), dtype=torch.float32)
        return _straight_through(scaled, self.vectors(codes)), codes, none, none

    def vectors(self, codes: Tensor) -> Tensor:
        """[...] to [..., Z] in -1 to 1."""
        digits = [codes // place % level for place, level in zip(self.basis, self.levels, strict=True)]
        return torch.stack(
            [(digit - level // 2).float() / (level // 2) for digit, level in zip(digits, self.levels, strict=True)],
            dim=-1,
        )

    def codes_of(self, vectors: Tensor) -> Tensor:
        """The code of the nearest point of the lattice, [..., Z] to [...]."""
        digits = [
            ((channel * (level // 2)).round().long() + level // 2).clamp(0, level - 1)
            for channel, level in self._channels(vectors)
        ]
        return torch.stack([digit * place for digit, place in zip(digits, self.basis, strict=True)]).sum(0)

    def _channels(self, z: Tensor) -> list[tuple[Tensor, int]]:
        return list(zip(z.unbind(-1), self.levels, strict=True))


def _bounded(z: Tensor, level: int) -> Tensor:
    """Into the range that rounds to exactly `level` whole numbers; 0 stays 0, where an even count lies off-centre."""
    half = (level - 1) * (1 + MARGIN) / 2
    offset = 0.0 if level % 2 else 0.5
    return torch.tanh(z + math.atanh(offset / half)) * half - offset


class Codebook(nn.Module):
    """Vector quantisation (van den Oord et al., 2017) on a sphere (Yu et al., 2022): the code is the vector of the
    nearest direction.

    Both sides are scaled to the length sqrt(Z), so that a code cannot die by being too short or too long. The codebook
    follows by gradient rather than by a running mean: a forward that changed state would depend on the split of a batch.
    """

    def __init__(self, num_codes: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_codes, size)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """z [B, *grid, Z] to vectors with z's gradient, codes [B, *grid], codebook loss [B] and commitment loss [B]."""
        z = _on_sphere(z.float())
        codes = self.codes_of(z)
        vectors = self.vectors(codes)
        codebook = (vectors - z.detach()).square().flatten(1).mean(1)
        commitment = (vectors.detach() - z).square().flatten(1).mean(1)
        return _straight_through(z, vectors), codes, codebook, commitment

    def vectors(self, codes: Tensor) -> Tensor:
        return F.embedding(codes, self.table())

    @torch.no_grad()
    def codes_of(self, vectors: Tensor) -> Tensor:
        # In half precision neighbours would be confused: 8 bits cannot tell directions apart that differ by 1/256.
        with torch.autocast(vectors.device.type, enabled=False):
            return (vectors.float() @ self.table().T).argmax(-1)

    def table(self) -> Tensor:
        """[K, Z]: what decoding looks up."""
        return _on_sphere(self.embedding.weight.float())


def _on_sphere(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1) * math.sqrt(x.shape[-1])


def _straight_through(z: Tensor, vectors: Tensor) -> Tensor:
    """The value of `vectors` to the last bit, since z - z is 0, and the gradient of z."""
    return vectors.detach() + (z - z.detach())


class CodeAutoencoder(nn.Module):
    """Over images with a codebook, the names are those of diffusers' VQModel."""

    def __init__(self, shape: CodesShape) -> None:
        super().__init__()
        self.shape = shape
        inner, size = shape.autoencoder, shape.autoencoder.latent_channels
        self.encoder = Encoder(inner, size)
        self.quant_conv = convolution(inner, size, size, kernel=1)
        self.quantize: FiniteScalarQuantizer | Codebook = (
            FiniteScalarQuantizer(shape.levels) if shape.levels is not None else Codebook(shape.num_codes, size)
        )
        self.post_quant_conv = convolution(inner, size, size, kernel=1)
        self.decoder = Decoder(inner)
        self.checkpoint_blocks = False

    def initialise(self, seed: int) -> None:
        initialise_convolutional(self, seed, residual_layers=count_residual_layers(self.shape.autoencoder))

    @property
    def num_codes(self) -> int:
        return self.shape.num_codes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B, *grid, C]: the reconstruction, codes [B, *latent grid], codebook loss [B] and commitment loss [B]."""
        vectors, codes, codebook, commitment = self.quantize(self._latents(x))
        return self._decoded(vectors), codes, codebook, commitment

    def encode(self, x: Tensor) -> Tensor:
        """[B, *grid, C] to int64 [B, *latent grid], each from 0 to K - 1."""
        return self.quantize(self._latents(x))[1]

    def decode(self, codes: Tensor) -> Tensor:
        """[B, *latent grid] to [B, *grid, C]."""
        return self._decoded(self.quantize.vectors(codes))

    def shape_of(self, grid: Sequence[int]) -> tuple[int, ...]:
        """The grid of codes of data with these sides."""
        return self.shape.autoencoder.latent_grid(grid)

    def diffusers_config(self, *, sample_size: int = 256) -> dict[str, Any]:
        """The arguments of a VQModel that `diffusers_state` fits."""
        if self.shape.levels is not None:
            raise UsageError("diffusers has no finite scalar quantisation; train with a codebook to export it there")
        config = diffusers_config(self.shape.autoencoder, sample_size=sample_size)
        absent = ("shift_factor", "use_quant_conv", "use_post_quant_conv")
        return {
            **{key: value for key, value in config.items() if key not in absent},
            "num_vq_embeddings": self.num_codes,
            "vq_embed_dim": self.shape.autoencoder.latent_channels,
        }

    def diffusers_state(self) -> dict[str, Tensor]:
        """Our weights with the codebook as it is looked up: among vectors of one length, VQModel's nearest is ours."""
        assert isinstance(self.quantize, Codebook)
        return {**self.state_dict(), "quantize.embedding.weight": self.quantize.table().detach()}

    def _latents(self, x: Tensor) -> Tensor:
        self.shape.autoencoder.latent_grid(x.shape[1:-1])
        hidden = self.encoder(to_channels_first(x), checkpointed=self._checkpointed)
        return self.quant_conv(hidden).movedim(1, -1)

    def _decoded(self, vectors: Tensor) -> Tensor:
        z = self.post_quant_conv(to_channels_first(vectors))
        return self.decoder(z, checkpointed=self._checkpointed).movedim(1, -1)

    @property
    def _checkpointed(self) -> bool:
        return self.checkpoint_blocks and self.training
