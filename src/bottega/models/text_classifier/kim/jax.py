"""Kim's convolutional text classifier in JAX: the twin of `torch.py`, with the same parameter names and numbers, without a wide part.

B batch   T tokens   E embedding   F filters of one width   D features, all filters   K classes
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bottega.models.initial import draw_parameters
from bottega.models.jax_layers import Conv, Embedding, Linear, Module, checkpoint_block, dropout, take_max
from bottega.models.text_classifier.config import KimShape
from bottega.models.text_classifier.kim.initial import initial_value

Array = Any


class Kim(Module):
    """Convolutions over token embeddings, max-over-time pooling and a linear head.

    Rows are padded on the right; `mask` (B, T) is true for text, and padding has no influence.
    """

    def __init__(self, shape: KimShape) -> None:
        assert shape.num_buckets is None, "the wide part has no JAX form"
        self.shape = shape
        self.embedding = Embedding(shape.vocab_size, shape.embed_size)
        self.convolutions = nnx.List(
            [Conv(shape.embed_size, shape.num_filters, (width,)) for width in shape.filter_sizes]
        )
        self.head = Linear(shape.num_features, shape.num_labels)

    def __call__(self, ids: Array, mask: Array) -> Array:
        """Return logits (B, K) of tokens `ids` (B, T)."""
        return self.head(dropout(self.features(ids, mask), self.shape.dropout))

    def features(self, ids: Array, mask: Array) -> Array:
        """Return the largest activation of each filter over the text, (B, D)."""
        x = self.embedding(ids) * mask[..., None]
        # Pad to the widest filter, or a short text would have no window.
        missing = max(0, max(self.shape.filter_sizes) - ids.shape[1])
        x = jnp.pad(x, ((0, 0), (0, missing), (0, 0))).swapaxes(1, 2)
        mask = jnp.pad(mask, ((0, 0), (0, missing)))
        pooled = [checkpoint_block(partial(max_over_time, convolution))(x, mask) for convolution in self.convolutions]
        return jax.nn.relu(jnp.concatenate(pooled, axis=1))


def max_over_time(convolution: Conv, x: Array, mask: Array) -> Array:
    """Return the maximum (B, F) over windows that are all text; a shorter text has its first window only."""
    activations = convolution(x)
    is_text = mask[:, mask.shape[1] - activations.shape[2] :].at[:, 0].set(True)
    return take_max(jnp.where(is_text[:, None], activations, -jnp.inf), axis=2)


def initialise_kim(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Return the initial values of parameters by name, each a function of the seed, its name and its shape."""
    return draw_parameters(shapes, lambda name, shape: initial_value(name, shape, seed))
