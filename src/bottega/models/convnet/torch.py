"""A small residual network of convolutions that tells classes apart: of pictures, spectrograms and video.

B batch   C channels   D features   K classes   [*grid] two or three sides, such as height and width

Group norms in place of batch norms, so that a sample's answer depends on that sample alone, no buffer has to travel
with the weights, and any split of a batch gives the same sums.
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

LARGEST_GROUPS = 8


def convolution(ins: int, outs: int, kernel: tuple[int, ...], *, stride: tuple[int, ...]) -> nn.Module:
    """Over two or three sides; with stride 1 they keep their length."""
    kind: Callable[..., nn.Module] = nn.Conv2d if len(kernel) == 2 else nn.Conv3d
    padding = tuple(side // 2 for side in kernel)
    return kind(ins, outs, kernel, stride=stride, padding=padding, bias=False)


def group_norm(channels: int) -> nn.Module:
    return GroupNorm(math.gcd(channels, LARGEST_GROUPS), channels)


class Block(nn.Module):
    """Norm, activation and convolution, twice, added to what came in (He et al., 2016). The unit of checkpointing.

    Over three sides the first looks at each frame by itself, which costs a third; the second sees motion.
    """

    def __init__(self, ins: int, outs: int, stride: tuple[int, ...]) -> None:
        super().__init__()
        is_flat = len(stride) == 2
        inner, outer = ((3, 3), (3, 3)) if is_flat else ((1, 3, 3), (3, 3, 3))
        # Time is strided over by the one that looks along it, or every second frame would never be seen.
        first, second = (stride, (1, 1)) if is_flat else ((1, *stride[1:]), (stride[0], 1, 1))
        self.norm1 = group_norm(ins)
        self.conv1 = convolution(ins, outs, inner, stride=first)
        self.norm2 = group_norm(outs)
        self.conv2 = convolution(outs, outs, outer, stride=second)
        self.stride = stride
        single = (1,) * len(stride)
        self.widen = convolution(ins, outs, single, stride=single) if ins != outs else None

    def forward(self, x: Tensor) -> Tensor:
        added = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        if max(self.stride) > 1:
            # The mean rather than every second value, which would leave three quarters of the stream behind.
            pool = F.avg_pool2d if len(self.stride) == 2 else F.avg_pool3d
            x = pool(x, self.stride, ceil_mode=True)
        return (x if self.widen is None else self.widen(x)) + added


class ConvNet(nn.Module):
    def __init__(self, shape: ConvNetShape) -> None:
        super().__init__()
        self.shape = shape
        sides = len(shape.grid)
        self.stem = convolution(shape.channels + sides, shape.hidden_size, (3,) * sides, stride=shape.stem)
        blocks, ins = [], shape.hidden_size
        for stride, outs in zip(shape.stages, shape.widths, strict=True):
            for number in range(shape.num_layers):
                blocks.append(Block(ins, outs, stride if number == 0 else (1,) * sides))
                ins = outs
        self.blocks = nn.ModuleList(blocks)
        self.norm = group_norm(ins)
        self.head = nn.Linear(ins, shape.num_labels)
        self.checkpoint_blocks = False

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, K] of samples [B, *grid, C]."""
        features = self.features(x)
        return self.head(F.dropout(features, self.shape.dropout, self.training) if self.shape.dropout else features)

    def features(self, x: Tensor) -> Tensor:
        """[B, D]: what the classes are told by, a place where samples that look alike are near."""
        x = self.stem(torch.cat((x, coordinate_channels(x)), dim=-1).movedim(-1, 1))
        for block in self.blocks:
            if self.checkpoint_blocks and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        # The largest value over all places rather than their mean: in a film with a small thing on an empty ground the
        # mean left 40 classes at chance for 200 steps, where the largest value had told half of them.
        return F.silu(self.norm(x)).flatten(2).amax(2)


def coordinate_channels(x: Tensor) -> Tensor:
    """Where each value stands, from -1 to 1 in each direction, [B, *grid, sides] (Liu et al., 2018).

    The largest value over all places forgets where it was, and pitch is nothing but a place among the bands.
    """
    grid = x.shape[1:-1]
    lines = [torch.linspace(-1, 1, side, device=x.device, dtype=x.dtype) for side in grid]
    return torch.stack(torch.meshgrid(*lines, indexing="ij"), dim=-1).expand(len(x), *grid, len(grid))


def initialise_convnet(model: ConvNet, seed: int) -> None:
    """Set every parameter of a module that has memory, on any device. Only its own name and shape decide a value."""
    initialise_convolutional(model, seed, residual_layers=len(model.blocks))
