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
    """Logits and the spikes of all layers."""

    logits: Tensor
    """(B, K)"""
    spikes: tuple[Tensor, ...]
    """(S, B, N) of each layer."""


class SpikingNet(nn.Module):
    """Spiking layers, and a linear head over the firing rates of the last one."""

    def __init__(self, shape: SpikingNetShape) -> None:
        super().__init__()
        self.shape = shape
        widths = (shape.num_inputs, *(shape.hidden_size,) * shape.num_layers)
        self.layers = nn.ModuleList(
            SpikingLayer(in_features, out_features, shape.neuron) for in_features, out_features in pairwise(widths)
        )
        self.head = nn.Linear(shape.hidden_size, shape.num_labels)
        self.checkpoint_blocks = False

    def forward(self, x: Tensor, draws: Tensor | None = None) -> SpikingNetOutput:
        """Classify images (B, H, W, C).

        With rate coding, training passes uniform `draws` (B, S, H * W * C); without them the spikes are spread evenly, and
        the output is deterministic.
        """
        spikes = self.compute_spikes(x, draws)
        rates = spike_rate(spikes[-1])
        dropout = self.shape.dropout
        return SpikingNetOutput(self.head(F.dropout(rates, dropout, self.training) if dropout else rates), spikes)

    def features(self, x: Tensor) -> Tensor:
        """Return the firing rates (B, N) of the last layer, the input of the head."""
        return spike_rate(self.compute_spikes(x)[-1])

    def compute_spikes(self, x: Tensor, draws: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the spikes (S, B, N) of each layer."""
        activity, spikes = self.encode_input(x, draws), []
        for layer in self.layers:
            if self.checkpoint_blocks and self.training:
                activity = checkpoint(layer, activity, use_reentrant=False)
            else:
                activity = layer(activity)
            spikes.append(activity)
        return tuple(spikes)

    def encode_input(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        """Return the input of the first layer, (S, B, H * W * C)."""
        flat, shape = x.flatten(1), self.shape
        steps = shape.neuron.time_steps
        if shape.coding == "constant":
            return constant_code(flat, steps)
        scaled = (flat - shape.lowest) / (1 - shape.lowest)
        if shape.coding == "latency":
            return latency_code(scaled, steps)
        return rate_code(scaled, steps) if draws is None else rate_code_from_draws(scaled, draws)


def initialise_spiking(module: nn.Module, seed: int) -> None:
    """Initialise biases with zeros, and weights with normal values of variance 1 / fan-in.

    The potential after a few steps is then about a threshold of 1, so units start neither silent nor always firing. A
    value depends only on the seed and the parameter's name and shape.
    """

    def compute_value(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name.endswith("bias"):
            return np.zeros(shape, np.float32)
        return numpy_generator(seed, name).standard_normal(shape, dtype=np.float32) * np.float32(
            1 / math.sqrt(shape[1])
        )

    fill_parameters(module, compute_value)
