"""Inception v3 as the FID uses it: the network of TensorFlow's 2015-12-05 graph, up to its 2,048 pooled features.

It differs from later versions in its pooling: averages exclude the padding, and the last block uses max pooling. The
parameters have torchvision's names.

B batch   C channels   H W height and width of an image
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.models.metric_networks.weights_file import check_weights, read_weights

CONVERT_HINT = (
    "convert a .pth with safetensors.torch.save_file(torch.load(path, weights_only=True), 'inception.safetensors')"
)
WEIGHTS_HINT = "the weights of pytorch-fid (pt_inception-2015-12-05) fit, torchvision's own do not"

INPUT_SIZE = 299

average_pool = partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False)
max_pool = partial(F.max_pool2d, kernel_size=3, stride=1, padding=1)
halve = partial(F.max_pool2d, kernel_size=3, stride=2)


class Convolution(nn.Module):
    """Convolution, batch norm and ReLU; it keeps the image size unless it has a stride or `padded` is false."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        *,
        stride: int = 1,
        padded: bool = True,
    ) -> None:
        super().__init__()
        height, width = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        padding = (height // 2, width // 2) if padded and stride == 1 else 0
        self.conv = nn.Conv2d(in_channels, out_channels, (height, width), stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


Step = Convolution | tuple[Convolution, Convolution]
"""One convolution, or two parallel ones with the same input."""


class Mixed(nn.Module):
    """Parallel branches, concatenated by channel; the one named `branch_pool` pools first.

    A single step has the branch's name; several have `_1`, `_2`, ... appended, a pair `_2a` and `_2b`.
    """

    def __init__(self, pool: Callable[[Tensor], Tensor], branches: Mapping[str, Sequence[Step]]) -> None:
        super().__init__()
        self.pool = pool
        self.branches: dict[str, list[list[str]]] = {}
        for branch, steps in branches.items():
            self.branches[branch] = names = []
            for i, step in enumerate(steps, 1):
                name = branch if len(steps) == 1 else f"{branch}_{i}"
                convolutions = {name + "a": step[0], name + "b": step[1]} if isinstance(step, tuple) else {name: step}
                names.append(list(convolutions))
                for convolution_name, module in convolutions.items():
                    self.add_module(convolution_name, module)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self._apply_branch(x, branch) for branch in self.branches], dim=1)

    def _apply_branch(self, x: Tensor, branch: str) -> Tensor:
        x = self.pool(x) if branch == "branch_pool" else x
        for names in self.branches[branch]:
            x = torch.cat([getattr(self, name)(x) for name in names], dim=1)
        return x


def _build_5x5_block(in_channels: int, pool_channels: int) -> Mixed:
    conv = Convolution
    branches: dict[str, list[Step]] = {
        "branch1x1": [conv(in_channels, 64, 1)],
        "branch5x5": [conv(in_channels, 48, 1), conv(48, 64, 5)],
        "branch3x3dbl": [conv(in_channels, 64, 1), conv(64, 96, 3), conv(96, 96, 3)],
        "branch_pool": [conv(in_channels, pool_channels, 1)],
    }
    return Mixed(average_pool, branches)


def _build_first_reduction(in_channels: int) -> Mixed:
    conv = Convolution
    branches: dict[str, list[Step]] = {
        "branch3x3": [conv(in_channels, 384, 3, stride=2)],
        "branch3x3dbl": [conv(in_channels, 64, 1), conv(64, 96, 3), conv(96, 96, 3, stride=2)],
        "branch_pool": [],
    }
    return Mixed(halve, branches)


def _build_7x7_block(in_channels: int, inner_channels: int) -> Mixed:
    """Return a block with 7 x 7 convolutions, factorised into 1 x 7 and 7 x 1."""
    conv, row, column = Convolution, (1, 7), (7, 1)
    double_convolutions = [
        conv(in_channels, inner_channels, 1),
        conv(inner_channels, inner_channels, column),
        conv(inner_channels, inner_channels, row),
        conv(inner_channels, inner_channels, column),
    ]
    branches: dict[str, list[Step]] = {
        "branch1x1": [conv(in_channels, 192, 1)],
        "branch7x7": [
            conv(in_channels, inner_channels, 1),
            conv(inner_channels, inner_channels, row),
            conv(inner_channels, 192, column),
        ],
        "branch7x7dbl": [*double_convolutions, conv(inner_channels, 192, row)],
        "branch_pool": [conv(in_channels, 192, 1)],
    }
    return Mixed(average_pool, branches)


def _build_second_reduction(in_channels: int) -> Mixed:
    conv = Convolution
    factorised_convolutions = [conv(in_channels, 192, 1), conv(192, 192, (1, 7)), conv(192, 192, (7, 1))]
    branches: dict[str, list[Step]] = {
        "branch3x3": [conv(in_channels, 192, 1), conv(192, 320, 3, stride=2)],
        "branch7x7x3": [*factorised_convolutions, conv(192, 192, 3, stride=2)],
        "branch_pool": [],
    }
    return Mixed(halve, branches)


def _build_wide_block(in_channels: int, pool: Callable[[Tensor], Tensor]) -> Mixed:
    conv = Convolution

    def build_cross() -> tuple[Convolution, Convolution]:
        return conv(384, 384, (1, 3)), conv(384, 384, (3, 1))

    branches: dict[str, list[Step]] = {
        "branch1x1": [conv(in_channels, 320, 1)],
        "branch3x3": [conv(in_channels, 384, 1), build_cross()],
        "branch3x3dbl": [conv(in_channels, 448, 1), conv(448, 384, 3), build_cross()],
        "branch_pool": [conv(in_channels, 192, 1)],
    }
    return Mixed(pool, branches)


class Inception(nn.Module):
    """Features (B, 2048) of images (B, 3, H, W) or (B, 1, H, W) in -1..1, of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Convolution(32, 32, 3, padded=False)
        self.Conv2d_2b_3x3 = Convolution(32, 64, 3)
        self.Conv2d_3b_1x1 = Convolution(64, 80, 1)
        self.Conv2d_4a_3x3 = Convolution(80, 192, 3, padded=False)
        self.Mixed_5b = _build_5x5_block(192, 32)
        self.Mixed_5c = _build_5x5_block(256, 64)
        self.Mixed_5d = _build_5x5_block(288, 64)
        self.Mixed_6a = _build_first_reduction(288)
        self.Mixed_6b = _build_7x7_block(768, 128)
        self.Mixed_6c = _build_7x7_block(768, 160)
        self.Mixed_6d = _build_7x7_block(768, 160)
        self.Mixed_6e = _build_7x7_block(768, 192)
        self.Mixed_7a = _build_second_reduction(768)
        self.Mixed_7b = _build_wide_block(1280, average_pool)
        self.Mixed_7c = _build_wide_block(2048, max_pool)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features (B, 2048) of images (B, C, H, W) with values in -1 to 1."""
        x = images.float().expand(-1, 3, -1, -1)
        # Not antialiased, because published FIDs are not: a better resize gives other distances.
        x = F.interpolate(x, size=(INPUT_SIZE, INPUT_SIZE), mode="bilinear", align_corners=False)
        x = halve(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x))))
        x = halve(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x)))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        return x.mean((2, 3))


def compute_inception_features(model: Inception, images: Tensor) -> Tensor:
    """Return features (B, 2048) of uint8 images (B, H, W, 3) or (B, H, W, 1)."""
    assert images.dtype == torch.uint8, f"expected uint8 images, as published FIDs use, got {images.dtype}"
    with torch.no_grad():
        return model(images.movedim(-1, 1).float() / 127.5 - 1)


def load_inception(path: Path | str, *, device: torch.device | str = "cpu") -> Inception:
    """Return the network with the weights of a safetensors file, in evaluation mode and frozen."""
    path = Path(path)
    weights = _read_feature_weights(path)
    with torch.device("meta"):
        model = Inception()
    expected = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    check_weights(path, weights, expected, hint=WEIGHTS_HINT)
    model.to_empty(device=device)
    state = model.state_dict()
    for name in expected:
        state[name].copy_(weights[name])
    return model.eval().requires_grad_(False)


def _read_feature_weights(path: Path) -> dict[str, Tensor]:
    """Read the weights without the classifier and the counters of BatchNorm, which features do not need."""
    tensors = read_weights(path, hint=CONVERT_HINT)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("fc.") and not name.endswith("num_batches_tracked")
    }
