"""The residual convolutional classifier in JAX: the twin of `torch.py`, with the same parameter names and numbers.

B batch   C channels   D features   K classes   *grid two or three sides, such as height and width
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bottega.models.convnet.config import MAX_GROUPS, ConvNetShape
from bottega.models.initial import draw_parameters
from bottega.models.initial_conv import initial_convolution
from bottega.models.jax_layers import Conv, GroupNorm, Linear, Module, checkpoint_block, dropout, take_max

Array = Any


def build_convolution(in_channels: int, out_channels: int, kernel: tuple[int, ...], *, stride: tuple[int, ...]) -> Conv:
    """Return a convolution over as many axes as the kernel has, with padding that keeps the sides at stride 1."""
    padding = tuple(side // 2 for side in kernel)
    return Conv(in_channels, out_channels, kernel, stride=stride, padding=padding, bias=False)


def build_group_norm(channels: int) -> GroupNorm:
    """Return a group norm with the largest number of groups up to MAX_GROUPS that divides the channels."""
    return GroupNorm(math.gcd(channels, MAX_GROUPS), channels)


class Block(Module):
    """A pre-activation residual block (He et al., 2016); the unit of gradient checkpointing.

    For video the first convolution works within each frame, at a third of the cost; the second spans time.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: tuple[int, ...]) -> None:
        is_2d = len(stride) == 2
        kernel1, kernel2 = ((3, 3), (3, 3)) if is_2d else ((1, 3, 3), (3, 3, 3))
        # The convolution that spans time strides over it; otherwise every second frame would be ignored.
        stride1, stride2 = (stride, (1, 1)) if is_2d else ((1, *stride[1:]), (stride[0], 1, 1))
        self.norm1 = build_group_norm(in_channels)
        self.conv1 = build_convolution(in_channels, out_channels, kernel1, stride=stride1)
        self.norm2 = build_group_norm(out_channels)
        self.conv2 = build_convolution(out_channels, out_channels, kernel2, stride=stride2)
        self.stride = stride
        ones = (1,) * len(stride)
        self.widen = (
            build_convolution(in_channels, out_channels, ones, stride=ones) if in_channels != out_channels else None
        )

    def __call__(self, x: Array) -> Array:
        delta = self.conv2(jax.nn.silu(self.norm2(self.conv1(jax.nn.silu(self.norm1(x))))))
        if max(self.stride) > 1:
            # Average pooling rather than striding, which would drop three quarters of the residual stream.
            x = average_pool(x, self.stride)
        return (x if self.widen is None else self.widen(x)) + delta


class ConvNet(Module):
    """Convolutional stem, residual stages, global max pooling and a linear head."""

    def __init__(self, shape: ConvNetShape) -> None:
        self.shape = shape
        num_axes = len(shape.grid)
        self.stem = build_convolution(
            shape.channels + num_axes, shape.hidden_size, (3,) * num_axes, stride=shape.stem_strides
        )
        blocks, in_channels = [], shape.hidden_size
        for stride, out_channels in zip(shape.stage_strides, shape.widths, strict=True):
            for index in range(shape.num_layers):
                blocks.append(Block(in_channels, out_channels, stride if index == 0 else (1,) * num_axes))
                in_channels = out_channels
        self.blocks = nnx.List(blocks)
        self.norm = build_group_norm(in_channels)
        self.head = Linear(in_channels, shape.num_labels)

    def __call__(self, x: Array) -> Array:
        """Return logits (B, K) of samples (B, *grid, C)."""
        return self.head(dropout(self.features(x), self.shape.dropout))

    def features(self, x: Array) -> Array:
        """Return the pooled features (B, D), the input of the head."""
        x = self.stem(jnp.moveaxis(jnp.concatenate((x, coordinate_channels(x)), axis=-1), -1, 1))
        for block in self.blocks:
            x = checkpoint_block(lambda y, block=block: block(y))(x)
        return take_max(jax.nn.silu(self.norm(x)).reshape(*x.shape[:2], -1), axis=2)


def average_pool(x: Array, window: tuple[int, ...]) -> Array:
    """Return the means over windows of x (B, C, *grid), of which the last ones may be smaller."""
    grid = x.shape[2:]
    padding = tuple((0, -side % width) for side, width in zip(grid, window, strict=True))
    sides = [n for side, width in zip(grid, window, strict=True) for n in (-(-side // width), width)]
    axes = tuple(range(3, 3 + 2 * len(window), 2))
    sums = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), *padding)).reshape(*x.shape[:2], *sides).sum(axis=axes)
    counts = np.pad(np.ones(grid, np.float32), padding).reshape(sides).sum(axis=tuple(axis - 2 for axis in axes))
    return (sums / counts).astype(x.dtype)


def coordinate_channels(x: Array) -> Array:
    """Return coordinates in -1..1 of each position, (B, *grid, axes) (CoordConv, Liu et al., 2018)."""
    grid = x.shape[1:-1]
    coordinates = np.meshgrid(*(np.linspace(-1, 1, side) for side in grid), indexing="ij")
    return jnp.broadcast_to(jnp.asarray(np.stack(coordinates, axis=-1), x.dtype), (len(x), *grid, len(grid)))


def initialise_convnet(
    shapes: Mapping[str, tuple[int, ...]], seed: int, *, residual_layers: int
) -> dict[str, np.ndarray]:
    """Return the initial values of parameters by name, each a function of the seed, its name and its shape."""
    return draw_parameters(
        shapes, lambda name, shape: initial_convolution(name, shape, seed, residual_layers=residual_layers)
    )
