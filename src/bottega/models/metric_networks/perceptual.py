"""How different two pictures look: LPIPS with its published weights, and where there are none, a distance of our own.

LPIPS (Zhang et al., 2018, version 0.1): AlexNet's five activations, unit length over channels at each place, squared
differences under learnt weights. Ours does the same, without weights, over the layers of a CLIP's eye, and has
another name because its numbers are other numbers.

B batch   C channels   H W size   T places   D width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.core.errors import UsageError
from bottega.models.metric_networks.weights_file import check_weights, read_weights

CONVERT = "docs/verbs/evaluate.md has the three lines that make one file of torchvision's AlexNet and the LPIPS heads"
FITS = "expected features.* of torchvision's alexnet and lin0..lin4.model.1.weight of LPIPS 0.1 (alex.pth)"

CHANNELS = (64, 192, 384, 256, 256)
SMALLEST = 31
"""Side in pixels of which AlexNet's second pool still has something to pool."""
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""ImageNet's mean and deviation for pictures in -1..1, rounded as published."""
TINY = 1e-10


@final
class Lpips(nn.Module):
    """Pictures [B, H, W, 3] in -1..1, twice, to distances [B]; 0 where they are equal.

    `features.*` carry torchvision's names of AlexNet, `lin*.model.1.weight` those of the published heads.
    """

    name = "lpips"

    def __init__(self) -> None:
        super().__init__()
        sizes = {"0": (3, 64, 11, 4, 2), "3": (64, 192, 5, 1, 2), "6": (192, 384, 3, 1, 1)}
        sizes |= {"8": (384, 256, 3, 1, 1), "10": (256, 256, 3, 1, 1)}
        self.features = nn.ModuleDict({key: nn.Conv2d(*size) for key, size in sizes.items()})
        for number, channels in enumerate(CHANNELS):
            head = nn.Module()
            head.model = nn.ModuleDict({"1": nn.Conv2d(channels, 1, 1, bias=False)})
            self.add_module(f"lin{number}", head)

    def layers(self, pictures: Tensor) -> list[Tensor]:
        """The five activations [B, C, H, W], each of unit length over C."""
        x = pictures.float().movedim(-1, 1)
        shift, scale = (x.new_tensor(values)[:, None, None] for values in (SHIFT, SCALE))
        x = (x - shift) / scale
        found = []
        for number, convolution in enumerate(self.features.values()):
            if number in (1, 2):
                x = F.max_pool2d(x, 3, 2)
            x = F.relu(convolution(x))
            found.append(x / (x.norm(dim=1, keepdim=True) + TINY))
        return found

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        if min(a.shape[1:3]) < SMALLEST:
            raise UsageError(
                f"LPIPS needs pictures of {SMALLEST} pixels a side, and these have {a.shape[2]} x {a.shape[1]}"
            )
        total = a.new_zeros(len(a), dtype=torch.float32)
        for number, (one, other) in enumerate(zip(self.layers(a), self.layers(b), strict=True)):
            head = self.get_submodule(f"lin{number}.model.1")
            total = total + head((one - other) ** 2).mean((1, 2, 3))
        return total


@final
class ClipPerceptual(nn.Module):
    """The same idea over the hidden layers of a CLIP's vision tower, where nobody has LPIPS weights at hand.

    Unit length over D at each place, squared differences summed over D, the mean over places and layers: from 0 to 4.
    """

    name = "perceptual"

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self.clip = clip

    def layers(self, pictures: Tensor) -> list[Tensor]:
        """Of each layer [B, T, D] of unit length, without the token of CLIP that stands for the whole picture."""
        network: Any = self.clip.network
        first = 1 if network.config.model_type == "clip" else 0
        states = _outputs(network.vision_model.encoder.layers, lambda: self.clip.images(pictures))  # type: ignore[operator]
        return [F.normalize(state[:, first:].float(), dim=-1, eps=TINY) for state in states]

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        apart = [((x - y) ** 2).sum(-1).mean(1) for x, y in zip(self.layers(a), self.layers(b), strict=True)]
        return torch.stack(apart).mean(0)


def _outputs(layers: Sequence[nn.Module], call: Callable[[], Any]) -> list[Tensor]:
    """What each of the layers gives while `call` runs, which scales and cuts pictures as the CLIP wants them."""
    found: list[Tensor] = []

    def keep(module: nn.Module, given: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    return found


def load_lpips(path: Path | str, *, device: Any = "cpu") -> Lpips:
    """The network with the weights of one safetensors file, to look through and not to train."""
    path = Path(path)
    found = _read(path)
    with torch.device("meta"):
        model = Lpips()
    wanted = model.state_dict()
    check_weights(path, found, wanted, fits=FITS)
    model.to_empty(device=device)
    model.load_state_dict({name: found[name].float() for name in wanted})
    return model.eval().requires_grad_(False)


def _read(path: Path) -> dict[str, Tensor]:
    """All but AlexNet's classifier, which no distance needs."""
    tensors = read_weights(path, convert=CONVERT)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("classifier.")}
