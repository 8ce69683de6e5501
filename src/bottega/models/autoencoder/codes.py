"""Autoencoder with discrete latents: vector (VQ) or finite scalar (FSQ) quantization between encoder and decoder.

B batch   C channels, last in all arguments and results   Z channels of a quantized vector   K codes
grid: L, or H W, or T H W
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.core.errors import UsageError
from bottega.models.autoencoder.config import CodesShape, count_residual_layers
from bottega.models.autoencoder.layout import diffusers_config
from bottega.models.autoencoder.resnet import Decoder, Encoder, build_convolution, to_channels_first
from bottega.models.initial_conv import initialise_convolutional

MARGIN = 1e-3
"""Fraction by which the bounded range exceeds the outermost levels, so that finite inputs reach them."""


class FiniteScalarQuantizer(nn.Module):
    """Finite scalar quantization (Mentzer et al., 2023): each channel is rounded to one of its levels.

    `levels` are the numbers of levels of the channels, and K is their product; a code is a number in mixed radix. There
    are no parameters, so codes cannot collapse. `levels` are Python numbers, because a tensor would be copied to the
    device at every call.
    """

    def __init__(self, levels: tuple[int, ...]) -> None:
        super().__init__()
        self.levels = levels
        self.basis = tuple(math.prod(levels[:i]) for i in range(len(levels)))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Quantize z (B, *grid, Z): vectors with straight-through gradient, codes (B, *grid), and two losses (B).

        The losses, of codebook and commitment, are 0, because there is no codebook.
        """
        scaled = torch.stack(
            [_bound(channel, num_levels) / (num_levels // 2) for channel, num_levels in self._pair_channels(z.float())],
            dim=-1,
        )
        codes = self.nearest_codes(scaled)
        zeros = z.new_zeros(len(z), dtype=torch.float32)
        return _apply_straight_through(scaled, self.embed_codes(codes)), codes, zeros, zeros

    def embed_codes(self, codes: Tensor) -> Tensor:
        """Map codes (...) to vectors (..., Z) in -1..1."""
        digits = [codes // place % num_levels for place, num_levels in zip(self.basis, self.levels, strict=True)]
        return torch.stack(
            [
                (digit - num_levels // 2).float() / (num_levels // 2)
                for digit, num_levels in zip(digits, self.levels, strict=True)
            ],
            dim=-1,
        )

    def nearest_codes(self, vectors: Tensor) -> Tensor:
        """Map vectors (..., Z) to the codes (...) of the nearest lattice points."""
        digits = [
            ((channel * (num_levels // 2)).round().long() + num_levels // 2).clamp(0, num_levels - 1)
            for channel, num_levels in self._pair_channels(vectors)
        ]
        return torch.stack([digit * place for digit, place in zip(digits, self.basis, strict=True)]).sum(0)

    def _pair_channels(self, z: Tensor) -> list[tuple[Tensor, int]]:
        """Return each channel of z with its number of levels."""
        return list(zip(z.unbind(-1), self.levels, strict=True))


def _bound(z: Tensor, num_levels: int) -> Tensor:
    """Squash z to the range that rounds to exactly `num_levels` integers.

    0 stays 0; for an even number of levels the range is off-centre.
    """
    half_range = (num_levels - 1) * (1 + MARGIN) / 2
    offset = 0.0 if num_levels % 2 else 0.5
    return torch.tanh(z + math.atanh(offset / half_range)) * half_range - offset


class Codebook(nn.Module):
    """Vector quantization (van den Oord et al., 2017) with cosine similarity (Yu et al., 2022).

    Latents and codebook vectors are scaled to length sqrt(Z), so that no code dies by its length. The codebook is trained by
    gradient, not by a running mean: a forward that changed state would depend on how a batch is split.
    """

    def __init__(self, num_codes: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_codes, size)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Quantize z (B, *grid, Z): vectors with straight-through gradient, codes (B, *grid), codebook and commitment
        loss (B)."""
        z = _normalize(z.float())
        codes = self.nearest_codes(z)
        vectors = self.embed_codes(codes)
        codebook_loss = (vectors - z.detach()).square().flatten(1).mean(1)
        commitment_loss = (vectors.detach() - z).square().flatten(1).mean(1)
        return _apply_straight_through(z, vectors), codes, codebook_loss, commitment_loss

    def embed_codes(self, codes: Tensor) -> Tensor:
        """Map codes (...) to vectors (..., Z) of length sqrt(Z)."""
        return F.embedding(codes, self.normalized_codebook())

    @torch.no_grad()
    def nearest_codes(self, vectors: Tensor) -> Tensor:
        """Map vectors (..., Z) to the codes (...) of largest cosine similarity."""
        # bfloat16 has 8 bits of precision and would confuse directions that differ by 1/256.
        with torch.autocast(vectors.device.type, enabled=False):
            return (vectors.float() @ self.normalized_codebook().T).argmax(-1)

    def normalized_codebook(self) -> Tensor:
        """Return the codebook (K, Z) with vectors of length sqrt(Z), as decoding uses it."""
        return _normalize(self.embedding.weight.float())


def _normalize(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1) * math.sqrt(x.shape[-1])


def _apply_straight_through(z: Tensor, vectors: Tensor) -> Tensor:
    """Return the exact value of `vectors` (z - z is 0) with the gradient of z."""
    return vectors.detach() + (z - z.detach())


class CodeAutoencoder(nn.Module):
    """Encoder, quantizer and decoder. For images with a codebook, the parameters are named as in diffusers' VQModel."""

    def __init__(self, shape: CodesShape) -> None:
        super().__init__()
        self.shape = shape
        autoencoder, size = shape.autoencoder, shape.autoencoder.latent_channels
        self.encoder = Encoder(autoencoder, size)
        self.quant_conv = build_convolution(autoencoder, size, size, kernel=1)
        self.quantize: FiniteScalarQuantizer | Codebook = (
            FiniteScalarQuantizer(shape.levels) if shape.levels is not None else Codebook(shape.num_codes, size)
        )
        self.post_quant_conv = build_convolution(autoencoder, size, size, kernel=1)
        self.decoder = Decoder(autoencoder)
        self.checkpoint_blocks = False

    def initialise(self, seed: int) -> None:
        """Initialise every parameter from the seed and its name."""
        initialise_convolutional(self, seed, residual_layers=count_residual_layers(self.shape.autoencoder))

    @property
    def num_codes(self) -> int:
        return self.shape.num_codes

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the reconstruction of x (B, *grid, C), codes (B, *latent grid), codebook and commitment loss (B)."""
        vectors, codes, codebook_loss, commitment_loss = self.quantize(self._encode_latents(x))
        return self._decode_latents(vectors), codes, codebook_loss, commitment_loss

    def encode(self, x: Tensor) -> Tensor:
        """Encode x (B, *grid, C) to codes, int64 (B, *latent grid) in 0..K - 1."""
        return self.quantize(self._encode_latents(x))[1]

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes (B, *latent grid) to data (B, *grid, C)."""
        return self._decode_latents(self.quantize.embed_codes(codes))

    def latent_shape(self, grid: Sequence[int]) -> tuple[int, ...]:
        """Return the sides of the code grid for data with sides `grid`."""
        return self.shape.autoencoder.latent_grid(grid)

    def diffusers_config(self, *, sample_size: int = 256) -> dict[str, Any]:
        """Return the configuration of a VQModel that can load `diffusers_state`."""
        if self.shape.levels is not None:
            raise UsageError(
                "diffusers has no finite scalar quantization; train with a codebook to export to diffusers"
            )
        config = diffusers_config(self.shape.autoencoder, sample_size=sample_size)
        unused_keys = ("shift_factor", "use_quant_conv", "use_post_quant_conv")
        return {
            **{key: value for key, value in config.items() if key not in unused_keys},
            "num_vq_embeddings": self.num_codes,
            "vq_embed_dim": self.shape.autoencoder.latent_channels,
        }

    def diffusers_state(self) -> dict[str, Tensor]:
        """Return the state dict with normalized codebook vectors, so that VQModel finds the same nearest vector as we do."""
        assert isinstance(self.quantize, Codebook)
        return {**self.state_dict(), "quantize.embedding.weight": self.quantize.normalized_codebook().detach()}

    def _encode_latents(self, x: Tensor) -> Tensor:
        self.shape.autoencoder.latent_grid(x.shape[1:-1])
        hidden = self.encoder(to_channels_first(x), use_checkpointing=self._uses_checkpointing)
        return self.quant_conv(hidden).movedim(1, -1)

    def _decode_latents(self, vectors: Tensor) -> Tensor:
        z = self.post_quant_conv(to_channels_first(vectors))
        return self.decoder(z, use_checkpointing=self._uses_checkpointing).movedim(1, -1)

    @property
    def _uses_checkpointing(self) -> bool:
        return self.checkpoint_blocks and self.training
