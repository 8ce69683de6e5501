"""Bottleneck adapters behind the output projections of attention and MLP (Houlsby et al., 2019): y + U gelu(D y).

S size of the bottleneck   O outputs of the layer in front of it
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from bottega.core.errors import UsageError
from bottega.core.noise import numpy_generator
from bottega.techniques.injected_layers import InjectedTask, find_injectable_layers, is_in_block, select_layers
from bottega.techniques.lora.peft_layout import (
    check_adapter_metadata,
    copy_adapter_tensors,
    read_adapter_metadata,
    read_weights,
    write_adapter_metadata,
    write_weights,
)

KIND, KEY = "bottleneck", "techniques.adapter"
START = f"{KEY}.start"
PARAMETER_NAMES = ("adapter_down", "adapter_down_bias", "adapter_up", "adapter_up_bias")
OUTPUT_PROJECTIONS = (
    # Our names, and those of the many models that follow Llama.
    *("o_proj", "down_proj", "to_out", "down"),
    # Names of other models.
    *("output.dense", "out_proj", "out_lin", "lin2", "fc2", "Wo", "wo", "o", "to_out.0", "net.2"),
)
"""Names of the output projection of attention and MLP."""


class Bottleneck(nn.Linear):
    """Linear layer followed by an adapter: D `(S, O)` and U `(O, S)`, with a bias each."""

    adapter_down: nn.Parameter
    adapter_down_bias: nn.Parameter
    adapter_up: nn.Parameter
    adapter_up_bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        hidden = F.gelu(F.linear(y, self.adapter_down, self.adapter_down_bias))
        return y + F.linear(hidden, self.adapter_up, self.adapter_up_bias)


class Adapter(InjectedTask):
    """A task with bottleneck adapters in its model."""

    key: ClassVar[str] = KEY
    export_note: ClassVar[str] = "this export contains nothing else"
    size: int = Field(32, gt=0)
    targets: tuple[str, ...] | None = None
    """None is the output projection of attention and MLP in each block."""

    def is_injected(self, name: str) -> bool:
        return name.rpartition(".")[2] in PARAMETER_NAMES

    def inject(self, model: nn.Module, seed: int) -> None:
        for name in self.choose_layers(model):
            inject_bottleneck(model.get_submodule(name), name, size=self.size, seed=seed)

    def load_adapter(self, folder: Path, model: nn.Module) -> None:
        read_bottlenecks(folder, model, self)

    def export(
        self, model: nn.Module, folder: Path, *, origin: str | None, export_whole: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Write the adapter alone: it cannot be merged into the weights of a plain model."""
        write_bottlenecks(model, folder, self, origin=origin)
        return {"library_name": "bottega"}

    def choose_layers(self, model: nn.Module) -> list[str]:
        """Return the names of the layers that an adapter follows."""
        candidates = [
            name
            for name in find_injectable_layers(model, kinds=(nn.Linear,))
            if not self.is_fully_trained(f"{name}.weight")
        ]
        if self.targets is not None:
            all_layers = [name for name, _ in model.named_modules() if name]
            return select_layers(candidates, self.targets, key=f"{KEY}.targets", layers=all_layers)
        suffixes = tuple(f".{suffix}" for suffix in OUTPUT_PROJECTIONS)
        selected = [name for name in candidates if is_in_block(name) and name.endswith(suffixes)]
        if not selected:
            raise UsageError(
                f"{KEY}.targets: {type(model).__name__} has no matrix inside numbered blocks with the name of an output "
                "projection; name layers as listed by bottega inspect, or use lora"
            )
        return selected


def inject_bottleneck(layer: nn.Module, name: str, *, size: int, seed: int) -> None:
    """Append an adapter to a layer, in place. U is 0, so the output does not change at first; D is drawn as a weight."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    width = weight.shape[0]
    limit = 1 / math.sqrt(width)
    values = numpy_generator(seed, f"{name}.adapter_down").uniform(-limit, limit, (size, width))
    layer.__class__ = Bottleneck
    assert isinstance(layer, Bottleneck)
    layer.adapter_down = nn.Parameter(torch.from_numpy(values).to(weight.device, weight.dtype))
    layer.adapter_down_bias = nn.Parameter(weight.new_zeros(size))
    layer.adapter_up = nn.Parameter(weight.new_zeros((width, size)))
    layer.adapter_up_bias = nn.Parameter(weight.new_zeros(width))


def write_bottlenecks(model: nn.Module, folder: Path, adapter: Adapter, *, origin: str | None) -> None:
    """Write `adapter_model.safetensors` with all trained parameters, and `bottega.json` with the size and the layers."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = list(find_bottlenecks(model))
    write_adapter_metadata(
        folder, KIND, hashes=adapter.hash_frozen_tensors(model), origin=origin, size=adapter.size, layers=layers
    )
    write_weights(folder, {name: p for name, p in model.named_parameters() if adapter.is_trainable(name)})


def read_bottlenecks(folder: Path, model: nn.Module, adapter: Adapter) -> None:
    """Load the adapter layers; size, layers and base model of the folder must match."""
    metadata = read_adapter_metadata(folder, key=START)
    check_adapter_metadata(metadata, folder, model, adapter, kind=KIND, key=START)
    if metadata.get("size") != adapter.size:
        raise UsageError(f"{KEY}.size is {adapter.size}, but {folder} has {metadata.get('size')}; set it to that value")
    targets: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if adapter.is_trainable(name)}
    copy_adapter_tensors(targets, read_weights(folder), folder, is_injected=adapter.is_injected, technique="adapter")


def find_bottlenecks(model: nn.Module) -> dict[str, Bottleneck]:
    """Return the layers with an adapter, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Bottleneck)}
