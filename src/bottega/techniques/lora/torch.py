"""Low-rank changes of a model's own layers (LoRA; Hu et al., 2021): W x + alpha / rank · B A x, where only A and B learn.

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

NAMES = ("lora_A", "lora_B")
CONVOLVE = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
KEY = "techniques.lora"


class LowRankLayer(nn.Module):
    """What all kinds of changed layers have in common; each is a layer of torch as well."""

    weight: Tensor
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float
    input_dropout: float
    base_weight: Tensor | None
    """The base's weight, while the change is added into it."""

    def _input(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.input_dropout, self.training) if self.input_dropout else x

    def weight_delta(self) -> Tensor:
        """What is added to the weight, of its shape."""
        return (self.scale * (self.lora_B.flatten(1) @ self.lora_A.flatten(1))).view_as(self.weight)


class LowRankLinear(LowRankLayer, nn.Linear):
    """A [r, I], B [O, r]."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.Linear.forward(self, x)
        if self.base_weight is not None:
            return y
        return y + self.scale * F.linear(F.linear(self._input(x), self.lora_A), self.lora_B)


class _LowRankKernel(LowRankLayer):
    """A [r, I, *kernel], B [O, r, 1...]: fewer filters over the same places, and a mixture of what they find."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.base_weight is not None:
            return y
        narrow = self._conv_forward(self._input(x), self.lora_A, None)  # type: ignore[operator]
        return y + self.scale * CONVOLVE[self.lora_B.dim()](narrow, self.lora_B)


class LowRankConv1d(_LowRankKernel, nn.Conv1d):
    pass


class LowRankConv2d(_LowRankKernel, nn.Conv2d):
    pass


class LowRankConv3d(_LowRankKernel, nn.Conv3d):
    pass


CHANGED: dict[type[nn.Module], type[LowRankLayer]] = {
    nn.Linear: LowRankLinear,
    nn.Conv1d: LowRankConv1d,
    nn.Conv2d: LowRankConv2d,
    nn.Conv3d: LowRankConv3d,
}
PLAIN = {changed: plain for plain, changed in CHANGED.items()}


class Lora(InjectedTask):
    key: ClassVar[str] = KEY
    export_note: ClassVar[str] = "the model here has it merged in"
    rank: int = Field(8, gt=0)
    alpha: float = Field(16.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: tuple[str, ...] | Literal["all-linear"] | None = None
    """None is every matrix inside the blocks, or where there is none every kernel."""

    def is_injected(self, name: str) -> bool:
        return name.rpartition(".")[2] in NAMES

    def inject(self, model: nn.Module, seed: int) -> None:
        for name in self.choose_layers(model):
            layer = model.get_submodule(name)
            inject_low_rank(layer, name, rank=self.rank, scale=self.alpha / self.rank, dropout=self.dropout, seed=seed)

    def notes(self, model: nn.Module) -> list[str]:
        layers = find_low_rank_layers(model)
        narrow = {name: min(one.weight.flatten(1).shape) for name, one in layers.items()}
        small = [name for name, side in narrow.items() if side < self.rank]
        if not small:
            return []
        shape = " x ".join(map(str, layers[small[0]].weight.shape))
        many = f"{len(small)} of {len(layers)} layers, such as {small[0]} of {shape},"
        return [f"{KEY}.rank: {self.rank} is more than {many} can have; a lower one learns the same there, with less"]

    def load_adapter(self, folder: Path, model: nn.Module) -> None:
        from bottega.techniques.lora.peft_layout import read_adapter

        read_adapter(folder, model, self)

    def export(
        self, model: nn.Module, folder: Path, *, origin: str | None, whole: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """The model as one that was never adapted, with its adapter beside it."""
        from bottega.techniques.lora.peft_layout import write_adapter

        with merged(model):
            facts = whole()
        write_adapter(model, folder, self, origin=origin)
        return facts

    def choose_layers(self, model: nn.Module) -> list[str]:
        layers = find_injectable_layers(model)
        able = {name: layer for name, layer in layers.items() if not self.is_fully_trained(f"{name}.weight")}
        matrices = [name for name, layer in able.items() if isinstance(layer, nn.Linear)]
        if isinstance(self.targets, tuple):
            every = [name for name, _ in model.named_modules() if name]
            return select_layers(able, self.targets, key=f"{KEY}.targets", layers=every)
        if self.targets == "all-linear":
            found = [name for name in matrices if is_in_block(name) or name.rpartition(".")[2] not in HEADS]
        else:
            inner = [name for name in able if is_in_block(name)]
            found = [name for name in inner if name in matrices] or inner
        if not found:
            said = "no matrix" if self.targets else "neither a matrix nor a convolution inside numbered blocks"
            raise UsageError(
                f"{KEY}.targets: {type(model).__name__} has {said}; name layers, as bottega inspect shows them"
            )
        return found


def inject_low_rank(layer: nn.Module, name: str, *, rank: int, scale: float, dropout: float, seed: int) -> None:
    """Nothing at first, because B is 0; A is drawn as a layer's weight would be, by its name."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    limit = 1 / math.sqrt(math.prod(weight.shape[1:]))
    drawn = numpy_generator(seed, f"{name}.lora_A").uniform(-limit, limit, (rank, *weight.shape[1:]))
    first = torch.from_numpy(drawn).to(weight.device, weight.dtype)
    second = weight.new_zeros((weight.shape[0], rank, *(1,) * (weight.dim() - 2)))
    layer.__class__ = CHANGED[type(layer)]
    assert isinstance(layer, LowRankLayer)
    layer.lora_A, layer.lora_B = nn.Parameter(first), nn.Parameter(second)
    layer.scale, layer.input_dropout, layer.base_weight = scale, dropout, None


def find_low_rank_layers(model: nn.Module) -> dict[str, LowRankLayer]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LowRankLayer)}


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add the changes into the weights: the same answers but for rounding, at the speed of the base."""
    for layer in find_low_rank_layers(model).values():
        if layer.base_weight is None:
            layer.base_weight = layer.weight.detach().clone()
            layer.weight.add_(layer.weight_delta())


@torch.no_grad()
def unmerge(model: nn.Module) -> None:
    """The base as it was, to the bit: put back rather than subtracted."""
    for layer in find_low_rank_layers(model).values():
        if layer.base_weight is not None:
            layer.weight.copy_(layer.base_weight)
            layer.base_weight = None


@contextmanager
def merged(model: nn.Module) -> Iterator[None]:
    """The model as one that was never adapted, with the changes in its weights; and then as it was."""
    merge(model)
    taken: list[tuple[LowRankLayer, dict[str, Any]]] = []
    for layer in find_low_rank_layers(model).values():
        taken.append((layer, {name: layer._parameters.pop(name) for name in NAMES}))
        layer.__class__ = PLAIN[type(layer)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, parameters in taken:
            layer.__class__ = CHANGED[type(layer)]
            layer._parameters.update(parameters)
        unmerge(model)
