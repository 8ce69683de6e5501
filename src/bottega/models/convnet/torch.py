"""A small residual convolutional classifier of images, spectrograms and video.

B batch   C channels   D features   K classes   *grid two or three sides, such as height and width

Group norms in place of batch norms: a sample's output depends on that sample alone, there are no buffers, and any split of
a batch gives the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bottega.models.convnet.config import ConvNetShape
from bottega.models.group_norm import GroupNorm
from bottega.models.initial_conv import initialise_convolutional

MAX_GROUPS = 8


def convolution(in_channels: int, out_channels: int, kernel: tuple[int, ...], *, stride: tuple[int, ...]) -> nn.Module:
    """Return a 2D or 3D convolution with padding that keeps the sides at stride 1."""
    kind: Callable[..., nn.Module] = nn.Conv2d if len(kernel) == 2 else nn.Conv3d
    padding = tuple(side // 2 for side in kernel)
    return kind(in_channels, out_channels, kernel, stride=stride, padding=padding, bias=False)


def group_norm(channels: int) -> nn.Module:
    """Return a group norm with the largest number of groups up to MAX_GROUPS that divides the channels."""
    return GroupNorm(math.gcd(channels, MAX_GROUPS), channels)


class Block(nn.Module):
    """A pre-activation residual block (He et al., 2016); the unit of gradient checkpointing.

    For video the first convolution works within each frame, at a third of the cost; the second spans time.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: tuple[int, ...]) -> None:
        super().__init__()
        is_flat = len(stride) == 2
        inner, outer = ((3, 3), (3, 3)) if is_flat else ((1, 3, 3), (3, 3, 3))
        # The convolution that spans time strides over it; otherwise every second frame would be ignored.
        first, second = (stride, (1, 1)) if is_flat else ((1, *stride[1:]), (stride[0], 1, 1))
        self.norm1 = group_norm(in_channels)
        self.conv1 = convolution(in_channels, out_channels, inner, stride=first)
        self.norm2 = group_norm(out_channels)
        self.conv2 = convolution(out_channels, out_channels, outer, stride=second)
        self.stride = stride
        single = (1,) * len(stride)
        self.widen = (
            convolution(in_channels, out_channels, single, stride=single) if in_channels != out_channels else None
        )

    def forward(self, x: Tensor) -> Tensor:
        added = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        if max(self.stride) > 1:
            # Average pooling rather than striding, which would drop three quarters of the residual stream.
            pool = F.avg_pool2d if len(self.stride) == 2 else F.avg_pool3d
            x = pool(x, self.stride, ceil_mode=True)
        return (x if self.widen is None else self.widen(x)) + added


class ConvNet(nn.Module):
    """Convolutional stem, residual stages, global max pooling and a linear head."""

    def __init__(self, shape: ConvNetShape) -> None:
        super().__init__()
        self.shape = shape
        sides = len(shape.grid)
        self.stem = convolution(shape.channels + sides, shape.hidden_size, (3,) * sides, stride=shape.stem)
        blocks, in_channels = [], shape.hidden_size
        for stride, out_channels in zip(shape.stages, shape.widths, strict=True):
            for number in range(shape.num_layers):
                blocks.append(Block(in_channels, out_channels, stride if number == 0 else (1,) * sides))
                in_channels = out_channels
        self.blocks = nn.ModuleList(blocks)
        self.norm = group_norm(in_channels)
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
    """Return coordinates in -1..1 of each position, (B, *grid, sides) (CoordConv, Liu et al., 2018).

    Max pooling discards positions, and pitch is a position among the mel bands.
    """
    grid = x.shape[1:-1]
    lines = [torch.linspace(-1, 1, side, device=x.device, dtype=x.dtype) for side in grid]
    return torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1).expand(len(x), *grid, len(grid))


def initialise_convnet(model: ConvNet, seed: int) -> None:
    """Set every parameter by its name and shape and the seed, on any device."""
    initialise_convolutional(model, seed, residual_layers=len(model.blocks))
