"""The transformer text classifier from scratch in JAX: the twin of `torch.py`, with the same parameter names and numbers, without a
wide part.

B batch   T tokens   D hidden size   K classes
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from bottega.models.decoder.jax import Block, SequenceContext, compute_rotary_tables
from bottega.models.initial import draw_parameters, initial_value
from bottega.models.jax_layers import (
    Embedding,
    Linear,
    Module,
    RMSNorm,
    checkpoint_block,
    dropout,
    get_compute_dtype,
)
from bottega.models.text_classifier.config import EncoderShape

Array = Any


class TextClassifier(Module):
    """Transformer encoder with mean pooling and a linear head.

    Rows are padded on the right; `mask` (B, T) is true for text, and padding has no influence.
    """

    def __init__(self, shape: EncoderShape) -> None:
        assert shape.num_buckets is None, "the wide part has no JAX form"
        self.shape = shape
        self.embedding = Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nnx.List([Block(shape.block_shape, layer) for layer in range(shape.num_layers)])
        for block in self.layers:
            block.self_attn.dropout = shape.attention_dropout
        self.norm = RMSNorm(shape.hidden_size, shape.block_shape.norm_epsilon)
        self.head = Linear(shape.hidden_size, shape.num_labels)

    def __call__(self, ids: Array, mask: Array) -> Array:
        """Return logits (B, K) of tokens `ids` (B, T)."""
        return self.head(dropout(self.features(ids, mask), self.shape.dropout))

    def features(self, ids: Array, mask: Array) -> Array:
        """Return the mean of the final hidden states of a text's tokens, (B, D)."""
        length = ids.shape[1]
        assert length <= self.shape.max_positions, f"{length} tokens exceed the {self.shape.max_positions} positions"
        cos, sin = compute_rotary_tables(self.shape.block_shape)
        # A row of padding alone attends to its first token, because cuDNN may return NaN for a softmax over nothing.
        is_attended = mask | (np.arange(length) == 0)
        attention_mask = jnp.broadcast_to(is_attended[:, None, None], (len(ids), 1, length, length))
        sequence = SequenceContext(cos[:length, None], sin[:length, None], attention_mask)
        x = self.embedding(ids)
        if get_compute_dtype() == jnp.bfloat16:
            x = x.astype(jnp.bfloat16)  # halves the memory traffic between blocks; the norms inside them stay float32
        x = dropout(x, self.shape.dropout)
        for block in self.layers:
            x = checkpoint_block(lambda y, block=block: block(y, sequence)[0])(x)
        # Selected rather than multiplied, because padding may have any value, also NaN.
        x = jnp.where(mask[..., None], self.norm(x).astype(jnp.float32), 0.0)
        return x.sum(axis=1) / jnp.maximum(mask.sum(axis=1, keepdims=True), 1)


def initialise_encoder(
    shapes: Mapping[str, tuple[int, ...]], seed: int, *, residual_layers: int
) -> dict[str, np.ndarray]:
    """Return the initial values of parameters by name, each a function of the seed, its name and its shape."""
    return draw_parameters(
        shapes, lambda name, shape: initial_value(name, shape, seed, residual_layers=residual_layers)
    )
