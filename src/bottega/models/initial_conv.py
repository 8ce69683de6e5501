"""Initial weights of convolutional models as a function of seed and parameter name, drawn in numpy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from bottega.core.noise import numpy_generator
from bottega.models.initial import fill_parameters

if TYPE_CHECKING:
    from torch import nn

RESIDUAL_OUTPUTS = ("conv2", "to_out.0")


def initial_convolution(name: str, shape: tuple[int, ...], seed: int, *, residual_layers: int) -> np.ndarray:
    """Return the initial value of a parameter: ones for a norm, zeros for a bias, else normal with variance 1 / fan-in.

    One variance for all would not do: the fan-in of a 1 x 1 kernel over 4 channels and that of a 3 x 3 x 3 kernel over
    512 channels differ by a factor of 3,000. Layers that write into the residual stream are scaled by
    1 / sqrt(residual_layers), so that as many additions keep its variance.
    """
    owner, _, kind = name.rpartition(".")
    if kind == "bias":
        return np.zeros(shape, np.float32)
    if "norm" in owner.rpartition(".")[2]:
        return np.ones(shape, np.float32)
    value = numpy_generator(seed, name).standard_normal(shape, dtype=np.float32)
    std = 1.0 / math.sqrt(math.prod(shape[1:]))
    value *= std / math.sqrt(residual_layers) if owner.endswith(RESIDUAL_OUTPUTS) else std
    return value


def initialise_convolutional(module: nn.Module, seed: int, *, residual_layers: int) -> None:
    """Initialise every parameter from the seed, its name and its shape, on any device."""
    fill_parameters(module, lambda name, shape: initial_convolution(name, shape, seed, residual_layers=residual_layers))
