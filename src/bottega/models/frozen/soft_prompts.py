"""Trained parameters of personalised image generation: image tokens, prefixes of each layer, and a mapping.

B batch   L image tokens   S prefix tokens   N layers   H hidden size   P width of the projection   W width of a text token
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from bottega.core.noise import numpy_generator
from bottega.models.frozen.config import SoftPromptShape
from bottega.models.initial import fill_parameters

TOKEN_SCALE = 0.02
"""Standard deviation of LLaMA's embeddings, and of nearly all language models at initialisation."""
PREFIX_SCALE = 0.02
"""Small beside real keys and values, which are about 1, so that the language model starts almost unchanged. At 1, the
default of nn.Embedding, it is disturbed before anything is learned."""


@final
class SoftPrompts(nn.Module):
    """Maps last hidden states at the image tokens (B, L, H) to text tokens of the image generator (B, L, W)."""

    checkpoint_blocks = False
    """The engine sets this on the trained model, where it has no effect: only layers of frozen models are recomputed."""

    def __init__(self, shape: SoftPromptShape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.num_kv_heads * shape.head_size
        self.image_tokens = nn.Parameter(torch.empty(shape.num_image_tokens, shape.hidden_size))
        if shape.num_prefix_tokens and shape.projection is not None:
            self.prefix_embedding = nn.Parameter(torch.empty(shape.num_prefix_tokens, shape.hidden_size))
            self.prefix_inner = nn.Linear(shape.hidden_size, shape.projection)
            self.prefix_outer = nn.Linear(shape.projection, shape.num_layers * 2 * kv_size)
        elif shape.num_prefix_tokens:
            self.prefix = nn.Parameter(torch.empty(shape.num_layers, 2, shape.num_prefix_tokens, kv_size))
        self.mapping = nn.Linear(shape.hidden_size, shape.text_size)

    def forward(self, compute_hidden_states: Callable[[SoftPrompts], Tensor]) -> Tensor:
        """Return text tokens (B, L, W) for the hidden states (B, L, H) of a language model with these prompts.

        `compute_hidden_states(self)` returns the hidden states. It is called inside the forward because
        DistributedDataParallel must see all parameters used in one forward.
        """
        return self.mapping(compute_hidden_states(self))

    def prefixes(self) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values (S, kv heads * head size) of each layer; an empty list if S is 0."""
        shape = self.shape
        if not shape.num_prefix_tokens:
            return []
        if shape.projection is None:
            keys_and_values: Tensor = self.prefix
        else:
            flat = self.prefix_outer(torch.tanh(self.prefix_inner(self.prefix_embedding)))
            keys_and_values = flat.view(shape.num_prefix_tokens, shape.num_layers, 2, -1).permute(1, 2, 0, 3)
        return [(keys, values) for keys, values in keys_and_values]

    def compile_blocks(self) -> None:
        """Do nothing: the only computation here is one small matrix product; the frozen models compile themselves."""


def build_soft_prompts(shape: SoftPromptShape, seed: int, *, token_scale: float = TOKEN_SCALE) -> SoftPrompts:
    """Return soft prompts with initial weights that depend only on the seed and on each parameter's name."""
    module = SoftPrompts(shape)
    initialise_soft_prompts(module, seed, token_scale=token_scale)
    return module


def initialise_soft_prompts(module: SoftPrompts, seed: int, *, token_scale: float = TOKEN_SCALE) -> None:
    """Set every parameter to its initial value.

    `token_scale` is the standard deviation of the language model's embeddings, which image tokens share a sequence with.
    Hidden states come out of a norm, so their standard deviation is about 1, like that of the generator's text tokens; a
    mapping with standard deviation 1 / sqrt(H) keeps it.
    """
    shape = module.shape
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    assert num_parameters == shape.num_parameters, (
        f"{num_parameters:,} parameters are trained, but {shape.num_parameters:,} were declared"
    )
    scales = {
        "image_tokens": token_scale,
        "prefix": PREFIX_SCALE,
        "prefix_embedding": 1.0,
        "prefix_inner.weight": 1 / math.sqrt(shape.hidden_size),
        "prefix_outer.weight": PREFIX_SCALE / math.sqrt(shape.projection or 1),
        "mapping.weight": 1 / math.sqrt(shape.hidden_size),
    }

    def compute_value(name: str, size: tuple[int, ...]) -> np.ndarray:
        if name.endswith("bias"):
            return np.zeros(size, np.float32)
        return np.float32(scales[name]) * numpy_generator(seed, name).standard_normal(size, dtype=np.float32)

    fill_parameters(module, compute_value)
