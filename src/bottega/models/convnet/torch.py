"""A small residual convolutional classifier of images, spectrograms and video.

B batch   C channels   D features   K classes   *grid two or three sides, such as height and width

It has group norms in place of batch norms, so that a sample's output depends on that sample alone, there are no buffers,
and any split of a batch gives the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bottega.models.convnet.config import MAX_GROUPS, ConvNetShape
from bottega.models.group_norm import GroupNorm
from bottega.models.initial_conv import initialise_convolutional


def build_convolution(
    in_channels: int, out_channels: int, kernel: tuple[int, ...], *, stride: tuple[int, ...]
) -> nn.Module:
    """Return a 2D or 3D convolution with padding that keeps the sides at stride 1."""
    conv_class: Callable[..., nn.Module] = nn.Conv2d if len(kernel) == 2 else nn.Conv3d
    padding = tuple(side // 2 for side in kernel)
    return conv_class(in_channels, out_channels, kernel, stride=stride, padding=padding, bias=False)


def build_group_norm(channels: int) -> nn.Module:
    """Return a group norm with the largest number of groups up to MAX_GROUPS that divides the channels."""
    return GroupNorm(math.gcd(channels, MAX_GROUPS), channels)


class Block(nn.Module):
    """A pre-activation residual block (He et al., 2016); the unit of gradient checkpointing.

    For video the first convolution works within each frame, at a third of the cost; the second spans time.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: tuple[int, ...]) -> None:
        super().__init__()
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

    def forward(self, x: Tensor) -> Tensor:
        delta = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        if max(self.stride) > 1:
            # Average pooling rather than striding, which would drop three quarters of the residual stream.
            pool = F.avg_pool2d if len(self.stride) == 2 else F.avg_pool3d
            x = pool(x, self.stride, ceil_mode=True)
        return (x if self.widen is None else self.widen(x)) + delta


class ConvNet(nn.Module):
    """Convolutional stem, residual stages, global max pooling and a linear head."""

    def __init__(self, shape: ConvNetShape) -> None:
        super().__init__()
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
        self.blocks = nn.ModuleList(blocks)
        self.norm = build_group_norm(in_channels)
        self.head = nn.Linear(in_channels, shape.num_labels)
        self.checkpoint_blocks = False

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K) of samples (B, *grid, C)."""
        features = self.features(x)
        return self.head(F.dropout(features, self.shape.dropout, self.training) if self.shape.dropout else features)

    def features(self, x: Tensor) -> Tensor:
        """Return the pooled features (B, D), the input of the head."""
        x = self.stem(torch.cat((x, coordinate_channels(x)), dim=-1).movedim(-1, 1))
        for block in self.blocks:
            if self.checkpoint_blocks and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        # Max rather than mean pooling: on videos of a small object over an empty background, mean pooling left 40 classes
        # at chance after 200 steps, where max pooling classified half of them.
        return F.silu(self.norm(x)).flatten(2).amax(2)


def coordinate_channels(x: Tensor) -> Tensor:
    """Return coordinates in -1..1 of each position, (B, *grid, axes) (CoordConv, Liu et al., 2018).

    Max pooling discards positions, and pitch is a position among the mel bands.
    """
    grid = x.shape[1:-1]
    coordinates = [torch.linspace(-1, 1, side, device=x.device, dtype=x.dtype) for side in grid]
    return torch.stack(torch.meshgrid(*coordinates, indexing="ij"), dim=-1).expand(len(x), *grid, len(grid))


def initialise_convnet(model: ConvNet, seed: int, *, residual_layers: int) -> None:
    """Initialise every parameter from the seed, its name and its shape, on any device."""
    initialise_convolutional(model, seed, residual_layers=residual_layers)
