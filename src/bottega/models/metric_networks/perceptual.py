"""Perceptual distances between images: LPIPS with its published weights, or a distance over the layers of a CLIP.

LPIPS (Zhang et al., 2018, version 0.1): AlexNet's five activations, normalised over channels at each position, and squared
differences with learned weights. The CLIP distance does the same over the layers of a vision tower, without learned weights;
its values are not comparable with LPIPS.

B batch   C channels   H W height and width   T positions   D hidden size
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

CONVERT_HINT = (
    "docs/verbs/evaluate.md has the three lines that make one file of torchvision's AlexNet and the LPIPS heads"
)
WEIGHTS_HINT = "expected features.* of torchvision's alexnet and lin0..lin4.model.1.weight of LPIPS 0.1 (alex.pth)"

CHANNELS = (64, 192, 384, 256, 256)
MIN_SIDE = 31
"""Smallest side in pixels that AlexNet's second pooling accepts."""
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
"""ImageNet's mean and standard deviation for images in -1..1, rounded as published."""
EPSILON = 1e-10


@final
class Lpips(nn.Module):
    """LPIPS distances (B,) of two batches of images (B, H, W, 3) in -1..1; 0 for equal images.

    `features.*` have the names of torchvision's AlexNet, `lin*.model.1.weight` those of the published heads.
    """

    name = "lpips"

    def __init__(self) -> None:
        super().__init__()
        # Index in torchvision's AlexNet -> in_channels, out_channels, kernel_size, stride, padding.
        convolutions = {"0": (3, 64, 11, 4, 2), "3": (64, 192, 5, 1, 2), "6": (192, 384, 3, 1, 1)}
        convolutions |= {"8": (384, 256, 3, 1, 1), "10": (256, 256, 3, 1, 1)}
        self.features = nn.ModuleDict({index: nn.Conv2d(*arguments) for index, arguments in convolutions.items()})
        for number, channels in enumerate(CHANNELS):
            head = nn.Module()
            head.model = nn.ModuleDict({"1": nn.Conv2d(channels, 1, 1, bias=False)})
            self.add_module(f"lin{number}", head)

    def compute_activations(self, images: Tensor) -> list[Tensor]:
        """Return the five activations (B, C, H, W), each of unit length over C."""
        x = images.float().movedim(-1, 1)
        shift, scale = (x.new_tensor(values)[:, None, None] for values in (SHIFT, SCALE))
        x = (x - shift) / scale
        activations = []
        for number, convolution in enumerate(self.features.values()):
            if number in (1, 2):
                x = F.max_pool2d(x, 3, 2)
            x = F.relu(convolution(x))
            activations.append(x / (x.norm(dim=1, keepdim=True) + EPSILON))
        return activations

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the LPIPS distance of each pair of images, (B)."""
        if min(a.shape[1:3]) < MIN_SIDE:
            raise UsageError(
                f"LPIPS needs images of at least {MIN_SIDE} pixels per side, got {a.shape[2]} x {a.shape[1]}; "
                "generate larger images, or leave out --lpips"
            )
        total = a.new_zeros(len(a), dtype=torch.float32)
        for number, (x, y) in enumerate(zip(self.compute_activations(a), self.compute_activations(b), strict=True)):
            head = self.get_submodule(f"lin{number}.model.1")
            total = total + head((x - y) ** 2).mean((1, 2, 3))
        return total


@final
class ClipPerceptual(nn.Module):
    """Perceptual distance over the hidden layers of a CLIP's vision tower, for use without LPIPS weights.

    It is the squared difference of normalised hidden states, summed over D and averaged over positions and layers: 0 to 4.
    """

    name = "perceptual"

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self.clip = clip

    def compute_hidden_states(self, images: Tensor) -> list[Tensor]:
        """Return the hidden states (B, T, D) of each layer, of unit length, without CLIP's class token."""
        network: Any = self.clip.network
        num_class_tokens = 1 if network.config.model_type == "clip" else 0
        states = _record_outputs(network.vision_model.encoder.layers, lambda: self.clip.encode_images(images))  # type: ignore[operator]
        return [F.normalize(state[:, num_class_tokens:].float(), dim=-1, eps=EPSILON) for state in states]

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the distance of each pair of images, (B): the mean over CLIP's layers."""
        distances = [
            ((x - y) ** 2).sum(-1).mean(1)
            for x, y in zip(self.compute_hidden_states(a), self.compute_hidden_states(b), strict=True)
        ]
        return torch.stack(distances).mean(0)


def _record_outputs(layers: Sequence[nn.Module], call: Callable[[], Any]) -> list[Tensor]:
    """Return the output of each layer during `call`, which also resizes and normalises the images for the CLIP."""
    outputs: list[Tensor] = []

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(record) for layer in layers]
    try:
        call()
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def load_lpips(path: Path | str, *, device: Any = "cpu") -> Lpips:
    """Return the network with the weights of a safetensors file, in evaluation mode and frozen."""
    path = Path(path)
    weights = _read_lpips_weights(path)
    with torch.device("meta"):
        model = Lpips()
    expected = model.state_dict()
    check_weights(path, weights, expected, hint=WEIGHTS_HINT)
    model.to_empty(device=device)
    model.load_state_dict({name: weights[name].float() for name in expected})
    return model.eval().requires_grad_(False)


def _read_lpips_weights(path: Path) -> dict[str, Tensor]:
    """Read the weights without AlexNet's classifier, which is not used."""
    tensors = read_weights(path, hint=CONVERT_HINT)
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("classifier.")}
