"""The variational autoencoder in JAX: the twin of `torch.py` and `resnet.py`, with the same parameter names and numbers.

It is frozen: in JAX a generator is trained in its latents, but no autoencoder is.

B batch   C channels, last in arguments and results of `Autoencoder`, first elsewhere   Z latent channels
grid: L, or H W, or T H W with T frames
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bottega.models.autoencoder.config import EPSILON, LOG_VARIANCE_BOUNDS, AutoencoderShape
from bottega.models.autoencoder.layout import read_autoencoder_tensors
from bottega.models.jax_layers import Conv, GroupNorm, Linear, Module, attend

Array = Any


class Autoencoder(Module):
    """Encoder to a Gaussian posterior and decoder."""

    def __init__(self, shape: AutoencoderShape) -> None:
        self.shape = shape
        self.encoder = Encoder(shape, 2 * shape.latent_channels)
        self.decoder = Decoder(shape)
        if shape.quant_conv:
            self.quant_conv = build_convolution(shape, 2 * shape.latent_channels, 2 * shape.latent_channels, kernel=1)
            self.post_quant_conv = build_convolution(shape, shape.latent_channels, shape.latent_channels, kernel=1)

    def encode(self, x: Array) -> tuple[Array, Array]:
        """Return mean and log variance of the posterior of x (B, *grid, C), each float32 (B, *latent grid, Z)."""
        self.shape.latent_grid(x.shape[1:-1])
        moments = self.encoder(jnp.moveaxis(x, -1, 1))
        if self.shape.quant_conv:
            moments = self.quant_conv(moments)
        mean, log_variance = jnp.split(jnp.moveaxis(moments, 1, -1).astype(jnp.float32), 2, axis=-1)
        return mean, jnp.clip(log_variance, *LOG_VARIANCE_BOUNDS)

    def decode(self, z: Array) -> Array:
        """Decode latents (B, *latent grid, Z) to data (B, *grid, C)."""
        z = jnp.moveaxis(z, -1, 1)
        if self.shape.quant_conv:
            z = self.post_quant_conv(z)
        return jnp.moveaxis(self.decoder(z), 1, -1)


def build_convolution(
    shape: AutoencoderShape,
    in_channels: int,
    out_channels: int,
    *,
    kernel: int = 3,
    strides: Sequence[int] | None = None,
) -> Conv:
    """Return a convolution that keeps sides with stride 1 and halves those with stride 2, which are padded at their end only."""
    strides = tuple(strides or (1,) * shape.dims)
    conv = Conv(in_channels, out_channels, (kernel,) * shape.dims, stride=strides)
    padding = [(kernel // 2, kernel // 2) if stride == 1 else (0, 1) for stride in strides]
    if shape.causal_time:
        padding[0] = (kernel - 1, 0)  # a frame depends on itself and earlier ones
    conv.padding = tuple(padding)
    return conv


class Norm(GroupNorm):
    """Group norm over the grid; in causal time over each frame, because statistics over a clip would leak later frames."""

    def __init__(self, shape: AutoencoderShape, width: int) -> None:
        super().__init__(shape.groups, width, EPSILON)
        self.is_per_frame = shape.causal_time

    def __call__(self, x: Array) -> Array:
        return (
            unflatten_frames(super().__call__(flatten_frames(x)), len(x)) if self.is_per_frame else super().__call__(x)
        )


def flatten_frames(x: Array) -> Array:
    """Reshape (B, C, T, H, W) to (B T, C, H, W)."""
    frames = jnp.swapaxes(x, 1, 2)
    return frames.reshape(-1, *frames.shape[2:])


def unflatten_frames(x: Array, batch_size: int) -> Array:
    """Reshape (B T, C, H, W) to (B, C, T, H, W)."""
    return jnp.swapaxes(x.reshape(batch_size, -1, *x.shape[1:]), 1, 2)


class ResnetBlock(Module):
    """Two convolutions with a residual connection."""

    def __init__(self, shape: AutoencoderShape, in_channels: int, out_channels: int) -> None:
        self.norm1, self.conv1 = Norm(shape, in_channels), build_convolution(shape, in_channels, out_channels)
        self.norm2, self.conv2 = Norm(shape, out_channels), build_convolution(shape, out_channels, out_channels)
        self.conv_shortcut = (
            build_convolution(shape, in_channels, out_channels, kernel=1) if in_channels != out_channels else None
        )

    def __call__(self, x: Array) -> Array:
        hidden = self.conv1(jax.nn.silu(self.norm1(x)))
        hidden = self.conv2(jax.nn.silu(self.norm2(hidden)))
        return hidden + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class GridAttention(Module):
    """Single-head attention over all positions of the grid; for video within each frame, which is cheaper and causal."""

    def __init__(self, shape: AutoencoderShape, width: int) -> None:
        self.group_norm = GroupNorm(shape.groups, width, EPSILON)
        self.to_q, self.to_k, self.to_v = (Linear(width, width) for _ in range(3))
        self.to_out = nnx.List([Linear(width, width)])
        self.is_per_frame = shape.dims == 3

    def __call__(self, x: Array) -> Array:
        grids = flatten_frames(x) if self.is_per_frame else x
        tokens = jnp.swapaxes(self.group_norm(grids.reshape(*grids.shape[:2], -1)), 1, 2)
        q, k, v = (project(tokens)[:, :, None] for project in (self.to_q, self.to_k, self.to_v))
        attended = self.to_out[0](attend(q, k, v)[:, :, 0])
        grids = jnp.swapaxes(attended, 1, 2).reshape(grids.shape)
        return x + (unflatten_frames(grids, len(x)) if self.is_per_frame else grids)


class Downsampler(Module):
    """Strided convolution that halves the sides with stride 2."""

    def __init__(self, shape: AutoencoderShape, width: int, strides: tuple[int, ...]) -> None:
        self.conv = build_convolution(shape, width, width, strides=strides)

    def __call__(self, x: Array) -> Array:
        return self.conv(x)


class Upsampler(Module):
    """Nearest-neighbour upsampling and a convolution."""

    def __init__(self, shape: AutoencoderShape, width: int, strides: tuple[int, ...]) -> None:
        self.conv = build_convolution(shape, width, width)
        self.strides = strides
        self.has_single_first_frame = shape.causal_time and strides[0] == 2

    def __call__(self, x: Array) -> Array:
        for axis, stride in enumerate(self.strides, start=2):
            x = jnp.repeat(x, stride, axis=axis)
        # The first latent is one frame, and each later latent is two.
        return self.conv(x[:, :, 1:] if self.has_single_first_frame else x)


class DownStage(Module):
    """Residual blocks of one encoder stage, followed by a downsampler in all but the last."""

    def __init__(self, shape: AutoencoderShape, in_channels: int, stage: int) -> None:
        width = shape.widths[stage]
        channels = [in_channels, *[width] * shape.layers_per_block]
        self.resnets = nnx.List([ResnetBlock(shape, a, b) for a, b in itertools.pairwise(channels)])
        is_last = stage == len(shape.widths) - 1
        self.downsamplers = nnx.List([] if is_last else [Downsampler(shape, width, shape.strides(stage))])

    def __call__(self, x: Array) -> Array:
        return _run_blocks([*self.resnets, *self.downsamplers], x)


class UpStage(Module):
    """Residual blocks of one decoder stage, one more than in the encoder's, followed by an upsampler in all but stage 0."""

    def __init__(self, shape: AutoencoderShape, in_channels: int, stage: int) -> None:
        width = shape.widths[stage]
        channels = [in_channels, *[width] * (shape.layers_per_block + 1)]
        self.resnets = nnx.List([ResnetBlock(shape, a, b) for a, b in itertools.pairwise(channels)])
        self.upsamplers = nnx.List([Upsampler(shape, width, shape.strides(stage - 1))] if stage > 0 else [])

    def __call__(self, x: Array) -> Array:
        return _run_blocks([*self.resnets, *self.upsamplers], x)


class MidStage(Module):
    """Two residual blocks at the lowest resolution, with optional attention between them."""

    def __init__(self, shape: AutoencoderShape) -> None:
        width = shape.widths[-1]
        self.attentions = nnx.List([GridAttention(shape, width)] if shape.mid_attention else [])
        self.resnets = nnx.List([ResnetBlock(shape, width, width) for _ in range(2)])

    def __call__(self, x: Array) -> Array:
        return _run_blocks([self.resnets[0], *self.attentions, self.resnets[1]], x)


class Encoder(Module):
    """Downsampling stages from data (B, C, *grid) to `out_channels` at the latent resolution."""

    def __init__(self, shape: AutoencoderShape, out_channels: int) -> None:
        widths = shape.widths
        self.conv_in = build_convolution(shape, shape.channels, widths[0])
        self.down_blocks = nnx.List([DownStage(shape, widths[max(i - 1, 0)], i) for i in range(len(widths))])
        self.mid_block = MidStage(shape)
        self.conv_norm_out = Norm(shape, widths[-1])
        self.conv_out = build_convolution(shape, widths[-1], out_channels)

    def __call__(self, x: Array) -> Array:
        x = _run_blocks([self.conv_in, *self.down_blocks, self.mid_block], x)
        return self.conv_out(jax.nn.silu(self.conv_norm_out(x)))


class Decoder(Module):
    """Upsampling stages from latents to data (B, C, *grid)."""

    def __init__(self, shape: AutoencoderShape) -> None:
        widths = shape.widths
        last_stage = len(widths) - 1
        self.conv_in = build_convolution(shape, shape.latent_channels, widths[-1])
        self.mid_block = MidStage(shape)
        self.up_blocks = nnx.List(
            [UpStage(shape, widths[min(i + 1, last_stage)], i) for i in reversed(range(len(widths)))]
        )
        self.conv_norm_out = Norm(shape, widths[0])
        self.conv_out = build_convolution(shape, widths[0], shape.channels)

    def __call__(self, z: Array) -> Array:
        z = _run_blocks([self.conv_in, self.mid_block, *self.up_blocks], z)
        return self.conv_out(jax.nn.silu(self.conv_norm_out(z)))


def _run_blocks(blocks: Sequence[Any], x: Array) -> Array:
    for block in blocks:
        x = block(x)
    return x


def load_weights(shapes: Mapping[str, tuple[int, ...]], folder: Path | str) -> dict[str, np.ndarray]:
    """Return the weights of a folder, whose names and shapes must be those of the model."""
    return read_autoencoder_tensors(folder, shapes, framework="jax")
