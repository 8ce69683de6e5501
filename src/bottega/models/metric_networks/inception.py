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

CONVERT = (
    "convert a .pth with safetensors.torch.save_file(torch.load(path, weights_only=True), 'inception.safetensors')"
)
FITS = "the weights of pytorch-fid (pt_inception-2015-12-05) fit, torchvision's own do not"

SIDE = 299

average = partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1, count_include_pad=False)
maximum = partial(F.max_pool2d, kernel_size=3, stride=1, padding=1)
halve = partial(F.max_pool2d, kernel_size=3, stride=2)


class Convolution(nn.Module):
    """Convolution, batch norm and ReLU; it keeps the image size unless it has a stride or `padded` is false."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int | tuple[int, int], *, stride: int = 1, padded: bool = True
    ) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2) if padded and stride == 1 else 0
        self.conv = nn.Conv2d(inputs, outputs, (height, width), stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

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
                parts = {name + "a": step[0], name + "b": step[1]} if isinstance(step, tuple) else {name: step}
                names.append(list(parts))
                for part, module in parts.items():
                    self.add_module(part, module)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self._branch(x, branch) for branch in self.branches], dim=1)

    def _branch(self, x: Tensor, branch: str) -> Tensor:
        x = self.pool(x) if branch == "branch_pool" else x
        for names in self.branches[branch]:
            x = torch.cat([getattr(self, name)(x) for name in names], dim=1)
        return x


def _fives(inputs: int, pooled: int) -> Mixed:
    conv = Convolution
    branches: dict[str, list[Step]] = {
        "branch1x1": [conv(inputs, 64, 1)],
        "branch5x5": [conv(inputs, 48, 1), conv(48, 64, 5)],
        "branch3x3dbl": [conv(inputs, 64, 1), conv(64, 96, 3), conv(96, 96, 3)],
        "branch_pool": [conv(inputs, pooled, 1)],
    }
    return Mixed(average, branches)


def _first_reduction(inputs: int) -> Mixed:
    conv = Convolution
    branches: dict[str, list[Step]] = {
        "branch3x3": [conv(inputs, 384, 3, stride=2)],
        "branch3x3dbl": [conv(inputs, 64, 1), conv(64, 96, 3), conv(96, 96, 3, stride=2)],
        "branch_pool": [],
    }
    return Mixed(halve, branches)


def _sevens(inputs: int, inner: int) -> Mixed:
    """Return a block with 7 x 7 convolutions, factorised into 1 x 7 and 7 x 1."""
    conv, row, column = Convolution, (1, 7), (7, 1)
    double = [conv(inputs, inner, 1), conv(inner, inner, column), conv(inner, inner, row), conv(inner, inner, column)]
    branches: dict[str, list[Step]] = {
        "branch1x1": [conv(inputs, 192, 1)],
        "branch7x7": [conv(inputs, inner, 1), conv(inner, inner, row), conv(inner, 192, column)],
        "branch7x7dbl": [*double, conv(inner, 192, row)],
        "branch_pool": [conv(inputs, 192, 1)],
    }
    return Mixed(average, branches)


def _second_reduction(inputs: int) -> Mixed:
    conv = Convolution
    seven = [conv(inputs, 192, 1), conv(192, 192, (1, 7)), conv(192, 192, (7, 1))]
    branches: dict[str, list[Step]] = {
        "branch3x3": [conv(inputs, 192, 1), conv(192, 320, 3, stride=2)],
        "branch7x7x3": [*seven, conv(192, 192, 3, stride=2)],
        "branch_pool": [],
    }
    return Mixed(halve, branches)


def _wide(inputs: int, pool: Callable[[Tensor], Tensor]) -> Mixed:
    conv = Convolution

    def crossed() -> tuple[Convolution, Convolution]:
        return conv(384, 384, (1, 3)), conv(384, 384, (3, 1))

    branches: dict[str, list[Step]] = {
        "branch1x1": [conv(inputs, 320, 1)],
        "branch3x3": [conv(inputs, 384, 1), crossed()],
        "branch3x3dbl": [conv(inputs, 448, 1), conv(448, 384, 3), crossed()],
        "branch_pool": [conv(inputs, 192, 1)],
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
        self.Mixed_5b = _fives(192, 32)
        self.Mixed_5c = _fives(256, 64)
        self.Mixed_5d = _fives(288, 64)
        self.Mixed_6a = _first_reduction(288)
        self.Mixed_6b = _sevens(768, 128)
        self.Mixed_6c = _sevens(768, 160)
        self.Mixed_6d = _sevens(768, 160)
        self.Mixed_6e = _sevens(768, 192)
        self.Mixed_7a = _second_reduction(768)
        self.Mixed_7b = _wide(1280, average)
        self.Mixed_7c = _wide(2048, maximum)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features (B, 2048) of images (B, C, H, W) with values in -1 to 1."""
        x = images.float().expand(-1, 3, -1, -1)
        # Not antialiased, because published FIDs are not: a better resize gives other distances.
        x = F.interpolate(x, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        x = halve(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x))))
        x = halve(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x)))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        return x.mean((2, 3))


def inception_features(model: Inception, images: Tensor) -> Tensor:
    """Return features (B, 2048) of uint8 images (B, H, W, 3) or (B, H, W, 1)."""
    assert images.dtype == torch.uint8, f"expected uint8 images, as published FIDs use, got {images.dtype}"
    with torch.no_grad():
        return model(images.movedim(-1, 1).float() / 127.5 - 1)


def load_inception(path: Path | str, *, device: torch.device | str = "cpu") -> Inception:
    """Return the network with the weights of a safetensors file, in evaluation mode and frozen."""
    path = Path(path)
    weights = _read(path)
    with torch.device("meta"):
        model = Inception()
    expected = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    check_weights(path, weights, expected, fits=FITS)
    model.to_empty(device=device)
    state = model.state_dict()
    for name in expected:
        state[name].copy_(weights[name])
    return model.eval().requires_grad_(False)


def _read(path: Path) -> dict[str, Tensor]:
    """Read the weights without the classifier and the counters of BatchNorm, which features do not need."""
    tensors = read_weights(path, convert=CONVERT)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("fc.") and not name.endswith("num_batches_tracked")
    }
