"""LoRA layers (Hu et al., 2021): W x + alpha / rank · B A x, where only A and B are trained.

r rank   I inputs   O outputs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from bottega.core.errors import UsageError
from bottega.core.noise import numpy_generator
from bottega.techniques.injected_layers import HEADS, InjectedTask, find_injectable_layers, is_in_block, select_layers

PARAMETER_NAMES = ("lora_A", "lora_B")
CONVOLVE = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
KEY = "techniques.lora"


class LowRankLayer(nn.Module):
    """Mixin of the low-rank layers; each is a torch layer as well."""

    weight: Tensor
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float
    input_dropout: float
    base_weight: Tensor | None
    """The base model's weight while the update is merged into `weight`."""

    def _apply_dropout(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.input_dropout, self.training) if self.input_dropout else x

    def weight_delta(self) -> Tensor:
        """Return the update of the weight, in its shape."""
        return (self.scale * (self.lora_B.flatten(1) @ self.lora_A.flatten(1))).view_as(self.weight)


class LowRankLinear(LowRankLayer, nn.Linear):
    """Linear layer with A `(r, I)` and B `(O, r)`."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.Linear.forward(self, x)
        if self.base_weight is not None:
            return y
        return y + self.scale * F.linear(F.linear(self._apply_dropout(x), self.lora_A), self.lora_B)


class _LowRankKernel(LowRankLayer):
    """Convolution with A `(r, I, *kernel)` and B `(O, r, 1...)`: r filters, mixed by a 1x1 convolution."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.base_weight is not None:
            return y
        filtered = self._conv_forward(self._apply_dropout(x), self.lora_A, None)  # type: ignore[operator]
        return y + self.scale * CONVOLVE[self.lora_B.dim()](filtered, self.lora_B)


class LowRankConv1d(_LowRankKernel, nn.Conv1d):
    """A 1D convolution with a low-rank update."""


class LowRankConv2d(_LowRankKernel, nn.Conv2d):
    """A 2D convolution with a low-rank update."""


class LowRankConv3d(_LowRankKernel, nn.Conv3d):
    """A 3D convolution with a low-rank update."""


LOW_RANK_CLASSES: dict[type[nn.Module], type[LowRankLayer]] = {
    nn.Linear: LowRankLinear,
    nn.Conv1d: LowRankConv1d,
    nn.Conv2d: LowRankConv2d,
    nn.Conv3d: LowRankConv3d,
}
PLAIN_CLASSES = {changed: plain for plain, changed in LOW_RANK_CLASSES.items()}


class Lora(InjectedTask):
    """A task with low-rank updates in the layers of its model."""

    key: ClassVar[str] = KEY
    export_note: ClassVar[str] = "the model here has it merged in"
    rank: int = Field(8, gt=0)
    alpha: float = Field(16.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: tuple[str, ...] | Literal["all-linear"] | None = None
    """None is every matrix inside the blocks, or every convolution if there is no matrix."""

    def is_injected(self, name: str) -> bool:
        return name.rpartition(".")[2] in PARAMETER_NAMES

    def inject(self, model: nn.Module, seed: int) -> None:
        for name in self.choose_layers(model):
            layer = model.get_submodule(name)
            inject_low_rank(layer, name, rank=self.rank, scale=self.alpha / self.rank, dropout=self.dropout, seed=seed)

    def notes(self, model: nn.Module) -> list[str]:
        layers = find_low_rank_layers(model)
        full_ranks = {name: min(layer.weight.flatten(1).shape) for name, layer in layers.items()}
        small_layers = [name for name, full_rank in full_ranks.items() if full_rank < self.rank]
        if not small_layers:
            return []
        shape = " x ".join(map(str, layers[small_layers[0]].weight.shape))
        layers_text = f"{len(small_layers)} of {len(layers)} layers, such as {small_layers[0]} ({shape})"
        return [
            f"{KEY}.rank: {self.rank} is above the full rank of {layers_text}; a lower rank can represent the same there"
        ]

    def load_adapter(self, folder: Path, model: nn.Module) -> None:
        from bottega.techniques.lora.peft_layout import read_adapter

        read_adapter(folder, model, self)

    def export(
        self, model: nn.Module, folder: Path, *, origin: str | None, export_whole: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Export the model with the update merged in, and the adapter beside it."""
        from bottega.techniques.lora.peft_layout import write_adapter

        with merged_weights(model):
            metadata = export_whole()
        write_adapter(model, folder, self, origin=origin)
        return metadata

    def choose_layers(self, model: nn.Module) -> list[str]:
        """Return the names of the layers that get a low-rank update."""
        layers = find_injectable_layers(model)
        candidates = {name: layer for name, layer in layers.items() if not self.is_fully_trained(f"{name}.weight")}
        matrices = [name for name, layer in candidates.items() if isinstance(layer, nn.Linear)]
        if isinstance(self.targets, tuple):
            all_layers = [name for name, _ in model.named_modules() if name]
            return select_layers(candidates, self.targets, key=f"{KEY}.targets", layers=all_layers)
        if self.targets == "all-linear":
            selected = [name for name in matrices if is_in_block(name) or name.rpartition(".")[2] not in HEADS]
        else:
            block_layers = [name for name in candidates if is_in_block(name)]
            selected = [name for name in block_layers if name in matrices] or block_layers
        if not selected:
            missing = "no matrix" if self.targets else "neither a matrix nor a convolution inside numbered blocks"
            raise UsageError(
                f"{KEY}.targets: {type(model).__name__} has {missing}; name layers as listed by bottega inspect"
            )
        return selected


def inject_low_rank(layer: nn.Module, name: str, *, rank: int, scale: float, dropout: float, seed: int) -> None:
    """Make a layer low-rank, in place. B is 0, so the output does not change at first; A is drawn as a weight would be."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    limit = 1 / math.sqrt(math.prod(weight.shape[1:]))
    values = numpy_generator(seed, f"{name}.lora_A").uniform(-limit, limit, (rank, *weight.shape[1:]))
    lora_a = torch.from_numpy(values).to(weight.device, weight.dtype)
    lora_b = weight.new_zeros((weight.shape[0], rank, *(1,) * (weight.dim() - 2)))
    layer.__class__ = LOW_RANK_CLASSES[type(layer)]
    assert isinstance(layer, LowRankLayer)
    layer.lora_A, layer.lora_B = nn.Parameter(lora_a), nn.Parameter(lora_b)
    layer.scale, layer.input_dropout, layer.base_weight = scale, dropout, None


def find_low_rank_layers(model: nn.Module) -> dict[str, LowRankLayer]:
    """Return the layers with a low-rank update, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LowRankLayer)}


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add the updates to the weights: the same outputs up to rounding, at the speed of the base model."""
    for layer in find_low_rank_layers(model).values():
        if layer.base_weight is None:
            layer.base_weight = layer.weight.detach().clone()
            layer.weight.add_(layer.weight_delta())


@torch.no_grad()
def unmerge(model: nn.Module) -> None:
    """Restore the base weights bit for bit, from a copy rather than by subtraction."""
    for layer in find_low_rank_layers(model).values():
        if layer.base_weight is not None:
            layer.weight.copy_(layer.base_weight)
            layer.base_weight = None


@contextmanager
def merged_weights(model: nn.Module) -> Iterator[None]:
    """Context in which the model has plain layers with merged weights, as if it had never been adapted."""
    merge(model)
    removed_parameters: list[tuple[LowRankLayer, dict[str, Any]]] = []
    for layer in find_low_rank_layers(model).values():
        removed_parameters.append((layer, {name: layer._parameters.pop(name) for name in PARAMETER_NAMES}))
        layer.__class__ = PLAIN_CLASSES[type(layer)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, parameters in removed_parameters:
            layer.__class__ = LOW_RANK_CLASSES[type(layer)]
            layer._parameters.update(parameters)
        unmerge(model)
