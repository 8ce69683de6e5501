"""Variational autoencoder with KL regularisation; for images it equals diffusers' AutoencoderKL, parameter names included.

B batch   C channels, last in all arguments and results   Z latent channels   grid: L, or H W, or T H W
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bottega.core.errors import UsageError
from bottega.models.autoencoder.config import LOG_VARIANCE_BOUNDS, AutoencoderShape, count_residual_layers
from bottega.models.autoencoder.layout import diffusers_config, read_autoencoder_shape, read_autoencoder_tensors
from bottega.models.autoencoder.resnet import Decoder, Encoder, build_convolution, to_channels_first
from bottega.models.initial_conv import initialise_convolutional


class Autoencoder(nn.Module):
    """Encoder to a Gaussian posterior and decoder. Build large ones on the meta device, then `to_empty` and `initialise`."""

    def __init__(self, shape: AutoencoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.encoder = Encoder(shape, 2 * shape.latent_channels)
        self.decoder = Decoder(shape)
        if shape.quant_conv:
            self.quant_conv = build_convolution(shape, 2 * shape.latent_channels, 2 * shape.latent_channels, kernel=1)
            self.post_quant_conv = build_convolution(shape, shape.latent_channels, shape.latent_channels, kernel=1)
        self.checkpoint_blocks = False

    def initialise(self, seed: int) -> None:
        """Set every parameter to its initial value."""
        initialise_convolutional(self, seed, residual_layers=count_residual_layers(self.shape))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return reconstruction, mean and log variance of x (B, *grid, C), with standard normal noise (B, *latent grid, Z)."""
        mean, log_variance = self.encode(x)
        return self.decode(mean + torch.exp(0.5 * log_variance) * noise), mean, log_variance

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log variance of the posterior of x (B, *grid, C), each float32 (B, *latent grid, Z)."""
        self.shape.latent_grid(x.shape[1:-1])
        moments = self.encoder(to_channels_first(x), use_checkpointing=self._uses_checkpointing)
        if self.shape.quant_conv:
            moments = self.quant_conv(moments)
        # float32 always: bfloat16 would round a mean of 1 by as much as the posterior's standard deviation.
        mean, log_variance = moments.movedim(1, -1).float().chunk(2, dim=-1)
        return mean, log_variance.clamp(*LOG_VARIANCE_BOUNDS)

    def decode(self, z: Tensor) -> Tensor:
        """Decode latents (B, *latent grid, Z) to data (B, *grid, C)."""
        z = to_channels_first(z)
        if self.shape.quant_conv:
            z = self.post_quant_conv(z)
        return self.decoder(z, use_checkpointing=self._uses_checkpointing).movedim(1, -1)

    def latent_shape(self, grid: Sequence[int]) -> tuple[int, ...]:
        """Return the latent shape (*latent grid, Z) for data with sides `grid`."""
        return self.shape.latent_shape(grid)

    def diffusers_config(self, *, sample_size: int = 256) -> dict[str, Any]:
        """Return the arguments of the AutoencoderKL that our state dict fits; `sample_size` is the training image side."""
        return diffusers_config(self.shape, sample_size=sample_size)

    @property
    def _uses_checkpointing(self) -> bool:
        return self.checkpoint_blocks and self.training


def load_autoencoder(folder: Path | str) -> Autoencoder:
    """Return the model of a folder that we or AutoencoderKL.save_pretrained wrote, in float32 on the CPU."""
    with torch.device("meta"):
        model = Autoencoder(read_autoencoder_shape(folder))
    model.to_empty(device="cpu")
    load_weights(model, folder)
    return model


def load_weights(model: Autoencoder, folder: Path | str) -> None:
    """Fill a model with the tensors of a folder, whose names and shapes must be those of the model."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict(read_autoencoder_tensors(folder, shapes))


def build_autoencoder(shape: AutoencoderShape, *, folder: str | None) -> Autoencoder:
    """Return the model of a folder, whose dimensions must be `shape`; without a folder, a new model."""
    if folder is None:
        return Autoencoder(shape)
    model = load_autoencoder(folder)
    expected_fields, loaded_fields = _select_architecture_fields(shape), _select_architecture_fields(model.shape)
    for name, value in expected_fields.items():
        if value != loaded_fields[name]:
            raise UsageError(
                f"model.from: {folder} has {name} {loaded_fields[name]}, but the recipe has {value}; they must be equal"
            )
    return model


def _select_architecture_fields(shape: AutoencoderShape) -> dict[str, Any]:
    """Return the dimensions on which the tensors depend: all but the scale and shift of latents."""
    fields = shape.model_dump(exclude={"norm_groups", "scaling_factor", "shift_factor"})
    return {**fields, "groups": shape.groups}
