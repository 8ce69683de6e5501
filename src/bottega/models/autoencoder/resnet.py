"""Convolutional encoder and decoder over one, two or three axes, with the parameter names of diffusers.

B batch   C channels, first in this file (B, C, *grid)   grid: L, or H W, or T H W with T frames
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bottega.models.autoencoder.config import EPSILON, AutoencoderShape
from bottega.models.group_norm import GroupNorm

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def to_channels_first(x: Tensor) -> Tensor:
    """Copy (B, *grid, C) to (B, C, *grid).

    A view would make convolutions work on channels-last memory, where 1 x 1 kernels and single input channels get gradients
    with strides that DistributedDataParallel warns about. `contiguous` would not copy a single channel, which torch
    counts as contiguous whatever its strides are.
    """
    return x.movedim(-1, 1).clone(memory_format=torch.contiguous_format)


class CausalConv3d(nn.Conv3d):
    """Convolution padded on the past side of time only, so that a frame depends on itself and earlier ones."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 0, 0, 0, self.kernel_size[0] - 1, 0)))


def build_convolution(
    shape: AutoencoderShape,
    in_channels: int,
    out_channels: int,
    *,
    kernel: int = 3,
    strides: Sequence[int] | None = None,
) -> nn.Module:
    """Return a convolution that keeps every side with stride 1; strided sides are padded by the caller."""
    strides = tuple(strides or (1,) * shape.dims)
    padding = [kernel // 2 if stride == 1 else 0 for stride in strides]
    conv_class: Any = CONVOLUTIONS[shape.dims]
    if shape.causal_time:
        padding[0], conv_class = 0, CausalConv3d
    return conv_class(in_channels, out_channels, kernel, stride=strides, padding=tuple(padding))


class Norm(GroupNorm):
    """Group norm over the grid; in causal time over each frame, because statistics over a clip would leak later frames."""

    def __init__(self, shape: AutoencoderShape, width: int) -> None:
        super().__init__(shape.groups, width, eps=EPSILON)
        self.is_per_frame = shape.causal_time

    def forward(self, x: Tensor) -> Tensor:
        return unflatten_frames(super().forward(flatten_frames(x)), len(x)) if self.is_per_frame else super().forward(x)


def flatten_frames(x: Tensor) -> Tensor:
    """Reshape (B, C, T, H, W) to (B T, C, H, W)."""
    return x.transpose(1, 2).flatten(0, 1)


def unflatten_frames(x: Tensor, batch_size: int) -> Tensor:
    """Reshape (B T, C, H, W) to (B, C, T, H, W)."""
    return x.unflatten(0, (batch_size, -1)).transpose(1, 2)


class ResnetBlock(nn.Module):
    """Two convolutions with a residual connection; the unit of gradient checkpointing."""

    def __init__(self, shape: AutoencoderShape, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = Norm(shape, in_channels), build_convolution(shape, in_channels, out_channels)
        self.norm2, self.conv2 = Norm(shape, out_channels), build_convolution(shape, out_channels, out_channels)
        self.conv_shortcut = (
            build_convolution(shape, in_channels, out_channels, kernel=1) if in_channels != out_channels else None
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        return hidden + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class GridAttention(nn.Module):
    """Single-head attention over all positions of the grid; for video within each frame, which is cheaper and causal."""

    def __init__(self, shape: AutoencoderShape, width: int) -> None:
        super().__init__()
        self.group_norm = GroupNorm(shape.groups, width, eps=EPSILON)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(width, width)])
        self.is_per_frame = shape.dims == 3

    def forward(self, x: Tensor) -> Tensor:
        grids = flatten_frames(x) if self.is_per_frame else x
        tokens = self.group_norm(grids.flatten(2)).transpose(1, 2)
        q, k, v = (project(tokens)[:, None] for project in (self.to_q, self.to_k, self.to_v))
        attended = self.to_out[0](F.scaled_dot_product_attention(q, k, v)[:, 0])
        grids = attended.transpose(1, 2).reshape(grids.shape)
        return x + (unflatten_frames(grids, len(x)) if self.is_per_frame else grids)


class Downsampler(nn.Module):
    """Strided convolution that halves the sides with stride 2."""

    def __init__(self, shape: AutoencoderShape, width: int, strides: tuple[int, ...]) -> None:
        super().__init__()
        self.conv = build_convolution(shape, width, width, strides=strides)
        # Padding at the end of each side only, as in the published models; F.pad counts from the last axis.
        is_causal = (shape.causal_time, *(False,) * (shape.dims - 1))
        end_padding = [int(stride == 2 and not causal) for stride, causal in zip(strides, is_causal, strict=True)]
        self.padding = [amount for end in reversed(end_padding) for amount in (0, end)]

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, self.padding))


class Upsampler(nn.Module):
    """Nearest-neighbour upsampling and a convolution."""

    def __init__(self, shape: AutoencoderShape, width: int, strides: tuple[int, ...]) -> None:
        super().__init__()
        self.conv = build_convolution(shape, width, width)
        self.scale = tuple(float(stride) for stride in strides)
        self.has_single_first_frame = shape.causal_time and strides[0] == 2

    def forward(self, x: Tensor) -> Tensor:
        x = F.interpolate(x, scale_factor=self.scale, mode="nearest")
        # The first latent is one frame, and each later latent is two.
        return self.conv(x[:, :, 1:] if self.has_single_first_frame else x)


class DownStage(nn.Module):
    """Residual blocks of one encoder stage, followed by a downsampler in all but the last."""

    def __init__(self, shape: AutoencoderShape, in_channels: int, stage: int) -> None:
        super().__init__()
        width = shape.widths[stage]
        channels = [in_channels, *[width] * shape.layers_per_block]
        self.resnets = nn.ModuleList(ResnetBlock(shape, a, b) for a, b in itertools.pairwise(channels))
        if stage < len(shape.widths) - 1:
            self.downsamplers = nn.ModuleList([Downsampler(shape, width, shape.strides(stage))])

    def blocks(self) -> list[nn.Module]:
        """Return the blocks of this stage in order; each can be checkpointed."""
        return [*self.resnets, *getattr(self, "downsamplers", ())]


class UpStage(nn.Module):
    """Residual blocks of one decoder stage, one more than in the encoder's, followed by an upsampler in all but stage 0."""

    def __init__(self, shape: AutoencoderShape, in_channels: int, stage: int) -> None:
        super().__init__()
        width = shape.widths[stage]
        channels = [in_channels, *[width] * (shape.layers_per_block + 1)]
        self.resnets = nn.ModuleList(ResnetBlock(shape, a, b) for a, b in itertools.pairwise(channels))
        if stage > 0:
            self.upsamplers = nn.ModuleList([Upsampler(shape, width, shape.strides(stage - 1))])

    def blocks(self) -> list[nn.Module]:
        """Return the blocks of this stage in order; each can be checkpointed."""
        return [*self.resnets, *getattr(self, "upsamplers", ())]


class MidStage(nn.Module):
    """Two residual blocks at the lowest resolution, with optional attention between them."""

    def __init__(self, shape: AutoencoderShape) -> None:
        super().__init__()
        width = shape.widths[-1]
        self.attentions = nn.ModuleList([GridAttention(shape, width)] if shape.mid_attention else [])
        self.resnets = nn.ModuleList(ResnetBlock(shape, width, width) for _ in range(2))

    def blocks(self) -> list[nn.Module]:
        """Return the blocks of this stage in order; each can be checkpointed."""
        return [self.resnets[0], *self.attentions, self.resnets[1]]


class Encoder(nn.Module):
    """Downsampling stages from data (B, C, *grid) to `out_channels` at the latent resolution."""

    def __init__(self, shape: AutoencoderShape, out_channels: int) -> None:
        super().__init__()
        widths = shape.widths
        self.conv_in = build_convolution(shape, shape.channels, widths[0])
        self.down_blocks = nn.ModuleList(DownStage(shape, widths[max(i - 1, 0)], i) for i in range(len(widths)))
        self.mid_block = MidStage(shape)
        self.conv_norm_out = Norm(shape, widths[-1])
        self.conv_out = build_convolution(shape, widths[-1], out_channels)

    def forward(self, x: Tensor, *, use_checkpointing: bool = False) -> Tensor:
        x = self.conv_in(x)
        for stage in (*self.down_blocks, self.mid_block):
            x = _run_stage(stage, x, use_checkpointing=use_checkpointing)
        return self.conv_out(F.silu(self.conv_norm_out(x)))


class Decoder(nn.Module):
    """Upsampling stages from latents to data (B, C, *grid)."""

    def __init__(self, shape: AutoencoderShape) -> None:
        super().__init__()
        widths = shape.widths
        last_stage = len(widths) - 1
        self.conv_in = build_convolution(shape, shape.latent_channels, widths[-1])
        self.mid_block = MidStage(shape)
        self.up_blocks = nn.ModuleList(
            UpStage(shape, widths[min(i + 1, last_stage)], i) for i in reversed(range(len(widths)))
        )
        self.conv_norm_out = Norm(shape, widths[0])
        self.conv_out = build_convolution(shape, widths[0], shape.channels)

    def forward(self, z: Tensor, *, use_checkpointing: bool = False) -> Tensor:
        z = self.conv_in(z)
        for stage in (self.mid_block, *self.up_blocks):
            z = _run_stage(stage, z, use_checkpointing=use_checkpointing)
        return self.conv_out(F.silu(self.conv_norm_out(z)))


def _run_stage(stage: nn.Module, x: Tensor, *, use_checkpointing: bool) -> Tensor:
    assert isinstance(stage, DownStage | MidStage | UpStage)
    for block in stage.blocks():
        if use_checkpointing and torch.is_grad_enabled():
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        else:
            x = block(x)
    return x
