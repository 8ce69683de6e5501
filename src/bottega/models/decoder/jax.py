"""The dense decoder in JAX: the twin of `torch.py`, with the same parameter names and numbers.

B batch   T tokens   D hidden size   K key-value heads   h head size   V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bottega.models.decoder.config import TransformerShape
from bottega.models.initial import draw_parameters, initial_value
from bottega.models.jax_layers import (
    Embedding,
    Linear,
    Module,
    RMSNorm,
    attend,
    checkpoint_block,
    dropout,
    get_compute_dtype,
    place_examples,
)
from bottega.models.losses.jax import cap_logits, linear_cross_entropy

Array = Any
LayerCache = tuple[Array, Array]
"""Keys and values of one layer, each (B, length, K, h)."""


class SequenceContext(NamedTuple):
    """Positions and masks of the tokens of one forward."""

    cos: Array
    """Cosine of each rotary angle, (T, 1, h), or (B, T, 1, h) if rows start at different positions; `sin` likewise."""
    sin: Array
    mask: Array | None = None
    """True for keys that a query may attend to, (B or 1, 1, T, S); None is plain causal attention."""
    positions: Array | None = None
    """Positions (B, T) of the tokens in the cache; None without a cache."""
    tokens: Array | None = None
    """Token ids (B, T) for layers with value embeddings."""


class Attention(Module):
    """Grouped-query attention with rotary positions, and optionally with QK-norm and an embedding added to the values."""

    def __init__(self, shape: TransformerShape, *, has_value_embedding: bool = False) -> None:
        query_size, key_size = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.q_proj = Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = Linear(shape.hidden_size, key_size, bias=False)
        self.v_proj = Linear(shape.hidden_size, key_size, bias=False)
        self.o_proj = Linear(query_size, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_size, shape.norm_epsilon) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_size, shape.norm_epsilon) if shape.qk_norm else None
        self.value_embed = Embedding(shape.vocab_size, key_size) if has_value_embedding else None
        self.head_size, self.dropout = shape.head_size, shape.dropout

    def __call__(
        self, x: Array, sequence: SequenceContext, cache: LayerCache | None
    ) -> tuple[Array, LayerCache | None]:
        """Return the output, and the cache with the keys and values of these tokens."""
        q, k, v = (
            projection(x).reshape(*x.shape[:2], -1, self.head_size)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.value_embed is not None:
            assert sequence.tokens is not None, "a layer with value embeddings needs the tokens"
            v = v + self.value_embed(sequence.tokens).reshape(v.shape).astype(v.dtype)
        # The angles are float32, so the rotation is too; half precision would blur positions that are far apart.
        q, k = (apply_rotary(y, sequence.cos, sequence.sin).astype(v.dtype) for y in (q, k))
        if cache is not None:
            assert sequence.positions is not None, "a forward with a cache has positions"
            rows = jnp.arange(len(x))[:, None]
            cache = (
                cache[0].at[rows, sequence.positions].set(k.astype(cache[0].dtype)),
                cache[1].at[rows, sequence.positions].set(v.astype(cache[1].dtype)),
            )
            k, v = cache[0].astype(v.dtype), cache[1].astype(v.dtype)
        attended = attend(q, k, v, mask=sequence.mask, is_causal=sequence.mask is None, dropout_rate=self.dropout)
        return self.o_proj(attended.reshape(*x.shape[:2], -1)), cache


class MLP(Module):
    """Feed-forward with SwiGLU (Shazeer, 2020), or without a gate and with squared ReLU (So et al., 2021)."""

    def __init__(self, shape: TransformerShape) -> None:
        has_gate = shape.activation == "swiglu"
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False) if has_gate else None
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def __call__(self, x: Array) -> Array:
        up = self.up_proj(x)
        if self.gate_proj is None:
            return self.down_proj(jnp.square(jax.nn.relu(up)))
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * up)


class Block(Module):
    """A decoder layer; the unit of gradient checkpointing."""

    def __init__(self, shape: TransformerShape, layer: int) -> None:
        self.self_attn = Attention(shape, has_value_embedding=shape.has_value_embedding(layer))
        self.mlp = MLP(shape) if shape.intermediate_size else None
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.post_attention_layernorm = (
            RMSNorm(shape.hidden_size, shape.norm_epsilon) if shape.intermediate_size else None
        )
        self.dropout = shape.dropout

    def __call__(
        self, x: Array, sequence: SequenceContext, cache: LayerCache | None = None
    ) -> tuple[Array, LayerCache | None]:
        """Return the residual stream and the updated cache."""
        mixed, cache = self.self_attn(self.input_layernorm(x), sequence, cache)
        x = x + dropout(mixed, self.dropout)
        if self.mlp is None or self.post_attention_layernorm is None:
            return x, cache
        return x + dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout), cache


class Trunk(Module):
    """Embedding, blocks and final norm: the parameters whose names start with `model.`."""

    def __init__(self, shape: TransformerShape) -> None:
        self.embed_tokens = Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nnx.List([Block(shape, layer) for layer in range(shape.num_layers)])
        self.norm = RMSNorm(shape.hidden_size, shape.norm_epsilon)


class Transformer(Module):
    """The language model without experts and state spaces."""

    def __init__(self, shape: TransformerShape) -> None:
        self.shape = shape
        self.model = Trunk(shape)
        if not shape.tie_embeddings:
            self.lm_head = Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def __call__(self, tokens: Array, targets: Array | None = None, *, documents: Array | None = None) -> Array:
        """Return logits (B, T, V); with targets (B, T), the summed negative log likelihood of the targets that are not -100.

        `documents` (B, T) are document ids, between which no information passes.
        """
        length = tokens.shape[1]
        cos, sin = compute_rotary_tables(self.shape)
        mask = None
        if documents is not None:
            is_causal = np.tril(np.ones((length, length), bool))
            mask = (is_causal & (documents[:, :, None] == documents[:, None, :]))[:, None]
        sequence = SequenceContext(cos[:length, None], sin[:length, None], mask, None, tokens)
        hidden, _ = self._run_blocks(tokens, sequence, None)
        if targets is None:
            return self.compute_logits(hidden)
        return linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            self.head_weight,
            targets.reshape(-1),
            dtype=get_compute_dtype(),
            softcap=self.shape.logit_softcap,
        )

    def decode(
        self, tokens: Array, cache: tuple[LayerCache, ...], positions: Array
    ) -> tuple[Array, tuple[LayerCache, ...]]:
        """Return hidden states (B, T, D) and the updated cache.

        `positions` (B, T) are those of the tokens; each attends to the positions up to its own.
        """
        cos, sin = (jnp.asarray(table)[positions][:, :, None] for table in compute_rotary_tables(self.shape))
        length = cache[0][0].shape[1]
        mask = (jnp.arange(length) <= positions[:, :, None])[:, None]
        hidden, new_cache = self._run_blocks(tokens, SequenceContext(cos, sin, mask, positions, tokens), cache)
        return hidden, new_cache

    def compute_logits(self, hidden: Array) -> Array:
        """Return logits (..., V) of hidden states (..., D)."""
        dtype = get_compute_dtype()
        return cap_logits(hidden.astype(dtype) @ self.head_weight.astype(dtype).T, self.shape.logit_softcap)

    @property
    def head_weight(self) -> Array:
        """Weight (V, D) of the head; with tied embeddings it is the weight of the embedding."""
        owner = self.model.embed_tokens if self.shape.tie_embeddings else self.lm_head
        return owner.weight[...]

    def _run_blocks(
        self, tokens: Array, sequence: SequenceContext, cache: tuple[LayerCache, ...] | None
    ) -> tuple[Array, tuple[LayerCache, ...]]:
        x = self.model.embed_tokens(tokens)
        if get_compute_dtype() == jnp.bfloat16:
            x = x.astype(jnp.bfloat16)  # halves the memory traffic between blocks
        x = place_examples(dropout(x, self.shape.dropout))
        new_cache: list[Any] = []
        for i, block in enumerate(self.model.layers):
            if cache is None:
                x = place_examples(checkpoint_block(lambda y, block=block: block(y, sequence)[0])(x))
            else:
                x, layer_cache = block(x, sequence, cache[i])
                new_cache.append(layer_cache)
        return self.model.norm(x), tuple(new_cache)


def compute_rotary_tables(shape: TransformerShape) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin of the rotary angles of every position, each (context, h), for the half-split layout."""
    exponents = np.arange(0, shape.head_size, 2, dtype=np.float32) / np.float32(shape.head_size)
    frequencies = np.float32(1.0) / np.float32(shape.rope_theta) ** exponents
    angles = np.arange(shape.context, dtype=np.float32)[:, None] * frequencies[None, :]
    angles = np.concatenate((angles, angles), axis=-1)
    return np.cos(angles), np.sin(angles)


def apply_rotary(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate pairs of channels of x (B, T, heads, h) by the angles of their positions."""
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate((-second, first), axis=-1) * sin


def initialise_decoder(
    shapes: Mapping[str, tuple[int, ...]], seed: int, *, residual_layers: int, zero_residual: bool = False
) -> dict[str, np.ndarray]:
    """Return the initial values of parameters by name, each a function of the seed and its name."""
    return draw_parameters(
        shapes,
        lambda name, shape: initial_value(
            name, shape, seed, residual_layers=residual_layers, zero_residual=zero_residual
        ),
    )
