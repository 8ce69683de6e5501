"""Initial weights as a function of seed and parameter name, drawn in numpy so that every engine agrees."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from bottega.core.noise import numpy_generator

if TYPE_CHECKING:
    from torch import nn

RESIDUAL_OUTPUTS = ("o_proj", "down_proj", "out_proj")


def initial_value(
    name: str,
    shape: tuple[int, ...],
    seed: int,
    *,
    std: float = 0.02,
    residual_layers: int,
    zero_residual: bool = False,
) -> np.ndarray:
    """Return the initial value of a parameter: ones for a norm, zeros for a bias, else normal with `std`.

    The standard deviation of stacked experts is 1 / sqrt(fan-in) instead.

    Layers that write into the residual stream are scaled by 1 / sqrt(2 L), where L is `residual_layers`, so that 2 L
    additions keep its variance (GPT-2). With `zero_residual` they are zero, so that each layer starts as the identity.
    """
    owner, _, kind = name.rpartition(".")
    is_stack = len(shape) == 3 and kind.endswith("_proj")  # experts: [experts, out_features, in_features]
    writes_residual = (name if is_stack else owner).endswith(RESIDUAL_OUTPUTS)
    if kind == "bias" or (zero_residual and writes_residual):
        return np.zeros(shape, np.float32)
    if "norm" in owner.rpartition(".")[2]:
        return np.ones(shape, np.float32)
    value = numpy_generator(seed, name).standard_normal(shape, dtype=np.float32)
    if is_stack:
        std = 1 / math.sqrt(shape[-1])
    value *= std / math.sqrt(2 * residual_layers) if writes_residual else std
    return value


def initialise(
    module: nn.Module, seed: int, *, std: float = 0.02, residual_layers: int, zero_residual: bool = False
) -> None:
    """Initialise every parameter from the seed, its name and its shape, on any device.

    A layer with a method `initial_value(kind, name, seed)` decides its own values.
    """
    own_rules = {path: layer for path, layer in module.named_modules() if hasattr(layer, "initial_value")}

    def compute_value(name: str, shape: tuple[int, ...]) -> np.ndarray:
        owner, _, kind = name.rpartition(".")
        if owner in own_rules:
            return own_rules[owner].initial_value(kind, name, seed)
        return initial_value(name, shape, seed, std=std, residual_layers=residual_layers, zero_residual=zero_residual)

    fill_parameters(module, compute_value)


def fill_parameters(module: nn.Module, compute_value: Callable[[str, tuple[int, ...]], np.ndarray]) -> None:
    """Set every parameter to `compute_value(name, shape)`; parameters on the meta device are skipped."""
    import torch

    def set_parameter(name: str, parameter: torch.nn.Parameter) -> None:
        if parameter.is_meta:
            return
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(compute_value(name, tuple(parameter.shape))))

    _map_in_threads(set_parameter, module.named_parameters())


def draw_parameters(
    shapes: Mapping[str, tuple[int, ...]], compute_value: Callable[[str, tuple[int, ...]], np.ndarray]
) -> dict[str, np.ndarray]:
    """Return `compute_value(name, shape)` of every parameter, by name."""
    return dict(zip(shapes, _map_in_threads(compute_value, shapes.items()), strict=True))


def _map_in_threads(function: Callable[[str, Any], Any], items: Iterable[tuple[str, Any]]) -> list[Any]:
    # numpy releases the interpreter lock while it draws, so threads across parameters use all cores.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return [future.result() for future in [pool.submit(function, *item) for item in items]]
