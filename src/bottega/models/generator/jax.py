"""The generator in JAX: the twin of `torch.py` for diffusion transformers, with the same parameter names and numbers.

B batch   L text tokens   W width of a text token   D width of the condition
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bottega.models.dit.initial import initial_value
from bottega.models.dit.jax import Attention, DiT, layer_norm
from bottega.models.generator.config import ConditionShape, DiTShape, GeneratorShape
from bottega.models.generator.layout import match_weights, read_generator
from bottega.models.initial import draw_parameters
from bottega.models.jax_layers import Embedding, Linear, Module

Array = Any


class Generator(Module):
    """The model of a generative task.

    `drop` (B) marks samples whose condition is removed, for classifier-free guidance; text conditions are dropped by the
    task, which replaces them by the empty text.
    """

    def __init__(self, shape: GeneratorShape) -> None:
        assert isinstance(shape.backbone, DiTShape), "a UNet has no form in JAX"
        self.shape = shape
        self.backbone = DiT(shape.backbone)
        self.condition: Any = _build_condition(shape.condition)

    def __call__(
        self,
        x: Array,
        time: Array,
        *,
        label: Array | None = None,
        vector: Array | None = None,
        input_ids: Array | None = None,
        mask: Array | None = None,
        drop: Array | None = None,
    ) -> Array:
        """Return the backbone's prediction, of the shape of x (B, *grid, C), at time (B) in 0..1,000.

        `label` (B) are class indices, `vector` (B, size) numbers, `input_ids` (B, L) tokens with their `mask` (B, L).
        """
        kind = self.shape.condition.kind
        if kind == "text":
            return self.backbone(x, time, context=self.condition(input_ids, mask), mask=mask)
        if kind == "none":
            return self.backbone(x, time)
        return self.backbone(x, time, vector=self.condition(label if kind == "class" else vector, drop))


class ClassCondition(Module):
    """Embedding of classes, with a last row for no class.

    Classes with attributes also add an embedding shared by all classes with the same attribute.
    """

    def __init__(self, shape: ConditionShape) -> None:
        self.shape = shape
        self.embedding = Embedding(shape.size + 1, shape.hidden_size)
        self.shared = Embedding(shape.null_row + 1, shape.hidden_size) if shape.shared else None

    def __call__(self, label: Array, drop: Array | None) -> Array:
        """Return the embedding of each label, (B, D); rows with `drop` have the embedding of no class."""
        label = label.astype(jnp.int32)
        label = label if drop is None else jnp.where(drop, self.shape.size, label)
        embedding = self.embedding(label)
        if self.shared is None:
            return embedding
        rows = jnp.asarray(np.array(self.shape.shared_rows, np.int32))
        return embedding + self.shared(rows[label]).sum(axis=-2)

    def fold_shared(self) -> np.ndarray:
        """Return one equivalent table (classes + 1, width), with the shared embeddings added."""
        return np.asarray(self(jnp.arange(self.shape.size + 1), None))


class VectorCondition(Module):
    """MLP over a vector of numbers; a learned vector stands for no condition."""

    def __init__(self, shape: ConditionShape) -> None:
        self.none = nnx.Param(jnp.zeros(shape.hidden_size))
        self.linear_1 = Linear(shape.size, shape.hidden_size)
        self.linear_2 = Linear(shape.hidden_size, shape.hidden_size)

    def __call__(self, vector: Array, drop: Array | None) -> Array:
        """Return the embedding of each vector, (B, D); rows with `drop` have the learned vector of no condition."""
        embedded = self.linear_2(jax.nn.silu(self.linear_1(vector)))
        return embedded if drop is None else jnp.where(drop[:, None], self.none[...].astype(embedded.dtype), embedded)


class TextBlock(Module):
    """A pre-norm transformer block, whose norms have no affine weights."""

    def __init__(self, width: int, num_heads: int) -> None:
        self.attn = Attention(width, num_heads)
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)

    def __call__(self, x: Array, mask: Array | None) -> Array:
        x = x + self.attn(layer_norm(x), mask=mask)
        return x + self.down(jax.nn.gelu(self.up(layer_norm(x)), approximate=True))


class TextEncoder(Module):
    """Bidirectional encoder from tokens (B, L) to hidden states (B, L, W) of unit variance."""

    def __init__(self, shape: ConditionShape) -> None:
        assert shape.vocab_size is not None, "a trained text encoder has a vocabulary"
        self.token_embedding = Embedding(shape.vocab_size, shape.text_size)
        self.position_embedding = Embedding(shape.max_tokens, shape.text_size)
        self.blocks = nnx.List([TextBlock(shape.text_size, shape.num_text_heads) for _ in range(shape.text_layers)])

    def __call__(self, ids: Array, mask: Array) -> Array:
        """Encode `ids` (B, L). `mask` (B, L) is true for text, at least once in each row; padding is encoded as 0."""
        x = self.token_embedding(ids) + self.position_embedding.weight[...][: ids.shape[1]]
        for block in self.blocks:
            x = block(x, mask[:, None, None, :])
        return layer_norm(x) * mask[..., None]


def initialise_generator(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Return the initial values of parameters by name, each a function of the seed, its name and its shape."""
    return draw_parameters(shapes, lambda name, shape: initial_value(name, shape, seed))


def load_generator(shapes: Mapping[str, tuple[int, ...]], folder: Path | str) -> dict[str, np.ndarray]:
    """Return the weights of a run's export or of a diffusers folder; `match_weights` checks that they fit."""
    return match_weights(read_generator(Path(folder), framework="jax"), shapes, folder)


def _build_condition(shape: ConditionShape) -> Module | None:
    if shape.kind == "class":
        return ClassCondition(shape)
    if shape.kind == "vector":
        return VectorCondition(shape)
    if shape.kind == "text":
        return TextEncoder(shape)
    return None
