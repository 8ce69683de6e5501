"""Image classifier of leaky integrate-and-fire units.

S time steps   B batch   N units of a layer   K classes   (H, W, C) an image
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bottega.core.noise import numpy_generator
from bottega.models.initial import fill_parameters
from bottega.models.spiking.coding import constant_code, latency_code, rate_code, rate_code_from_draws
from bottega.models.spiking.config import SpikingNetShape
from bottega.models.spiking.units import SpikingLayer, spike_rate


class SpikingNetOutput(NamedTuple):
    logits: Tensor
    """[B, K]"""
    spikes: tuple[Tensor, ...]
    """[S, B, N] of each layer."""


class SpikingNet(nn.Module):
    def __init__(self, shape: SpikingNetShape) -> None:
        super().__init__()
        self.shape = shape
        widths = (shape.num_inputs, *(shape.hidden_size,) * shape.num_layers)
        self.layers = nn.ModuleList(SpikingLayer(ins, outs, shape.neuron) for ins, outs in pairwise(widths))
        self.head = nn.Linear(shape.hidden_size, shape.num_labels)
        self.checkpoint_blocks = False

    def forward(self, x: Tensor, draws: Tensor | None = None) -> SpikingNetOutput:
        """Of pictures [B, H, W, C]. With rate coding, training hands over uniform draws [B, S, H * W * C]; without them the
        spikes are spread evenly, and the answer is the same every time."""
        spikes = self.spikes(x, draws)
        found = spike_rate(spikes[-1])
        dropout = self.shape.dropout
        return SpikingNetOutput(self.head(F.dropout(found, dropout, self.training) if dropout else found), spikes)

    def features(self, x: Tensor) -> Tensor:
        """Return the firing rates (B, N) of the last layer, the input of the head."""
        return spike_rate(self.spikes(x)[-1])

    def spikes(self, x: Tensor, draws: Tensor | None = None) -> tuple[Tensor, ...]:
        train, found = self.encode_input(x, draws), []
        for layer in self.layers:
            if self.checkpoint_blocks and self.training:
                train = checkpoint(layer, train, use_reentrant=False)
            else:
                train = layer(train)
            found.append(train)
        return tuple(found)

    def encode_input(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        """Return the input of the first layer, (S, B, H * W * C)."""
        flat, shape = x.flatten(1), self.shape
        steps = shape.neuron.time_steps
        if shape.coding == "constant":
            return constant_code(flat, steps)
        unit = (flat - shape.lowest) / (1 - shape.lowest)
        if shape.coding == "latency":
            return latency_code(unit, steps)
        return rate_code(unit, steps) if draws is None else rate_code_from_draws(unit, draws)


def initialise_spiking(module: nn.Module, seed: int) -> None:
    """Zeros for a bias, else normal with variance 1 / inputs: the charge of a few steps is then about a threshold of 1, so
    units begin neither silent nor always firing. Only a parameter's name and shape decide it."""

    def value(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("bias"):
            return np.zeros(shape, np.float32)
        return numpy_generator(seed, name).standard_normal(shape, dtype=np.float32) * np.float32(
            1 / math.sqrt(shape[1])
        )

    fill_parameters(module, value)
