"""Classifier of feature vectors: a trunk, experts chosen by a router, and a linear head.

B samples   I inputs   T tokens   D width   E experts   K labels   S time steps   U spiking units of all layers

The trunk computes the features that the router chooses experts by. With a spiking trunk they are firing rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bottega.core.noise import numpy_generator
from bottega.models.attention import RMSNorm, SequenceContext
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.torch import Block
from bottega.models.experts.torch import Experts, Routing, drop_initial_experts
from bottega.models.initial import RESIDUAL_OUTPUTS, fill_parameters
from bottega.models.routing.config import RoutingShape
from bottega.models.spiking.units import SpikingLayer

EPSILON = 1e-6
SPIKE_GAIN = 2.0
"""Factor of the initial weights that read spikes, which are sparse and never negative: without it the sixth layer fired a
tenth as often as the second, and half of all units fell silent in training."""


class RoutingNetOutput(NamedTuple):
    """Logits with the routing and the spikes behind them."""

    logits: Tensor
    """(B, K)"""
    routing: Routing
    spikes: Tensor | None
    """(S, B, U); None without a spiking trunk."""


class ResidualMLP(nn.Module):
    """A norm and a perceptron with one hidden layer, added to the input. The unit of gradient checkpointing."""

    def __init__(self, width: int, dropout: float, activation: str = "silu") -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = getattr(F, activation)
        self.norm = RMSNorm(width, EPSILON)
        self.up_proj = nn.Linear(width, width)
        self.down_proj = nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + apply_dropout(
            self.down_proj(self.activation(self.up_proj(self.norm(x)))), self.dropout, self.training
        )


class MLPTrunk(nn.Module):
    """A linear map and residual layers, (B, I) -> (B, D)."""

    def __init__(self, shape: RoutingShape) -> None:
        super().__init__()
        self.embed = nn.Linear(shape.num_inputs, shape.hidden_size)
        self.layers = nn.ModuleList(
            ResidualMLP(shape.hidden_size, shape.dropout, shape.activation) for _ in range(shape.num_layers)
        )
        self.checkpoint_blocks = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.embed(x)
        for layer in self.layers:
            stores_activations = not (self.checkpoint_blocks and self.training)
            x = layer(x) if stores_activations else checkpoint(layer, x, use_reentrant=False)
        return x, None


class SpikingTrunk(nn.Module):
    """Spiking layers, (B, I) -> firing rates (B, D) and all spikes.

    The inputs are a constant current of the first layer. Each further layer reads the mean of all layers before it:
    rates then stay between 0 and 1 at any depth, and the last layer is one step away from the first.
    """

    def __init__(self, shape: RoutingShape) -> None:
        super().__init__()
        assert shape.spiking is not None
        self.steps, self.dropout = shape.spiking.time_steps, shape.dropout
        sizes = [shape.num_inputs, *[shape.hidden_size] * (shape.num_layers - 1)]
        self.layers = nn.ModuleList(SpikingLayer(size, shape.hidden_size, shape.spiking) for size in sizes)
        self.checkpoint_blocks = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        spikes: list[Tensor] = []
        total = layer_input = x.expand(self.steps, *x.shape)
        for number, layer in enumerate(self.layers, start=1):
            stores_activations = not (self.checkpoint_blocks and self.training)
            spikes.append(
                layer(layer_input) if stores_activations else checkpoint(layer, layer_input, use_reentrant=False)
            )
            total = spikes[0] if number == 1 else total + spikes[-1]
            layer_input = total / number
        return apply_dropout(layer_input.mean(0), self.dropout, self.training), torch.cat(spikes, dim=-1)


class SSMTrunk(nn.Module):
    """State-space blocks of the text decoder over the inputs as T tokens, and their mean, (B, I) -> (B, D).

    The blocks have the decoder's names, so that a text model can share them.
    """

    def __init__(self, shape: RoutingShape) -> None:
        super().__init__()
        self.token_size, self.num_tokens, self.dropout = shape.token_size, shape.num_tokens, shape.dropout
        self.embed = nn.Linear(shape.token_size, shape.hidden_size)
        self.place = nn.Embedding(shape.num_tokens, shape.hidden_size)
        block_shape = _build_block_shape(shape)
        self.layers = nn.ModuleList(Block(block_shape, layer) for layer in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, EPSILON)
        self.checkpoint_blocks = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        tokens = F.pad(x, (0, self.token_size * self.num_tokens - x.shape[1])).unflatten(
            1, (self.num_tokens, self.token_size)
        )
        x = apply_dropout(self.embed(tokens) + self.place.weight, self.dropout, self.training)
        delta = torch.zeros_like(x)
        no_positions = x.new_zeros(0)  # state-space layers have no position embeddings
        context = SequenceContext(no_positions, no_positions)
        for block in self.layers:
            stores_activations = not (self.checkpoint_blocks and self.training)
            x, delta = (
                block(x, delta, context)
                if stores_activations
                else checkpoint(block, x, delta, context, use_reentrant=False)
            )
        return self.norm(x + delta).mean(1), None


def _build_block_shape(shape: RoutingShape) -> TransformerShape:
    """Return the shape of blocks as in a language model of kind ssm: a state space and no feed-forward."""
    return TransformerShape(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=0,
        vocab_size=2,  # unused, but the shape requires one
        context=shape.num_tokens,
        dropout=shape.dropout,
        norm_epsilon=EPSILON,
        mixers=("ssm",) * shape.num_layers,
        ssm=shape.ssm,
    )


TRUNKS: dict[str, Callable[[RoutingShape], MLPTrunk | SpikingTrunk | SSMTrunk]] = {
    "perceptron": MLPTrunk,
    "spiking": SpikingTrunk,
    "state_space": SSMTrunk,
}


class RoutingNet(nn.Module):
    """Classifier of vectors with a trunk, routed experts and a linear head.

    `mean` and `scale` standardise the inputs. They are functions of the data and not in the state dict; the caller that
    builds the model sets them with `set_scale`.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, shape: RoutingShape) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("mean", torch.zeros(shape.num_inputs), persistent=False)
        self.register_buffer("scale", torch.ones(shape.num_inputs), persistent=False)
        # As in transformers, `model` is everything before the head.
        self.model: MLPTrunk | SpikingTrunk | SSMTrunk = TRUNKS[shape.trunk](shape)
        self.norm = RMSNorm(shape.hidden_size, EPSILON)
        self.experts = Experts(shape.experts)
        self.out_norm = RMSNorm(shape.hidden_size, EPSILON)
        self.head = nn.Linear(shape.hidden_size, shape.num_labels)

    @property
    def checkpoint_blocks(self) -> bool:
        return self.model.checkpoint_blocks

    @checkpoint_blocks.setter
    def checkpoint_blocks(self, value: bool) -> None:
        self.model.checkpoint_blocks = value

    def forward(self, x: Tensor, sample_mask: Tensor | None = None) -> RoutingNetOutput:
        """Return logits of x (B, I); `sample_mask` (B) is false for padding, which uses no capacity and enters no sum."""
        features, spikes = self.model((x - self.mean) * self.scale)
        expert_output, routing = self.experts(self.norm(features), token_mask=sample_mask)
        return RoutingNetOutput(self.head(self.out_norm(features + expert_output)), routing, spikes)

    @torch.no_grad()
    def set_scale(self, mean: np.ndarray, scale: np.ndarray) -> None:
        """Set the normalisation of the inputs, (x - mean) * scale."""
        self.mean.copy_(torch.from_numpy(np.asarray(mean, np.float32)))
        self.scale.copy_(torch.from_numpy(np.asarray(scale, np.float32)))


def initialise_routing(model: RoutingNet, seed: int) -> None:
    """Initialise each weight by its fan-in or its layer's `initial_value`, and draw the experts dropped in the first step."""
    depth = max(1, model.shape.num_layers)
    self_initialised = {path: layer for path, layer in model.named_modules() if hasattr(layer, "initial_value")}

    def compute_value(name: str, shape: tuple[int, ...]) -> np.ndarray:
        owner, _, kind = name.rpartition(".")
        if owner in self_initialised:
            return self_initialised[owner].initial_value(kind, name, seed)
        if kind == "bias":
            return np.zeros(shape, np.float32)
        if "norm" in owner.rpartition(".")[2]:
            return np.ones(shape, np.float32)
        std = 1 / math.sqrt(shape[-1])
        if model.shape.spiking is not None and name.startswith("model."):
            std *= model.shape.spiking.threshold * (1.0 if name.startswith("model.layers.0.") else SPIKE_GAIN)
        if owner.endswith(RESIDUAL_OUTPUTS) and owner.startswith("model."):
            std /= math.sqrt(depth)
        return numpy_generator(seed, name).standard_normal(shape, dtype=np.float32) * np.float32(std)

    fill_parameters(model, compute_value)
    drop_initial_experts(model, seed)


def apply_dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Return x after dropout with probability `rate`; nothing is drawn if it is 0."""
    return F.dropout(x, rate, training) if rate else x
