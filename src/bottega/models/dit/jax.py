"""The diffusion transformer in JAX: the twin of `torch.py`, with the same parameter names and numbers.

B batch   N patches   P positions of a patch   D hidden size   H heads   L text tokens   W width of a text token   C channels
grid: the sides of a sample without its channels
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bottega.models.generator.config import EPSILON, TIME_EMBEDDING_SIZE, DiTShape
from bottega.models.jax_layers import (
    Linear,
    Module,
    attend,
    checkpoint_block,
    dropout,
    get_compute_dtype,
    place_examples,
)

Array = Any


@functools.lru_cache(maxsize=8)
def sinusoidal_positions(counts: tuple[int, ...], width: int) -> np.ndarray:
    """Return sinusoidal position embeddings (N, width) of `counts` patches in each dimension, float32.

    Each dimension has an equal part of the width.
    Channels that remain if the width cannot be divided equally are 0.
    """
    axis_width = 2 * (width // (2 * len(counts)))
    rates = 1.0 / 10000 ** (np.arange(axis_width // 2, dtype=np.float64) / (axis_width / 2))
    positions = np.meshgrid(*(np.arange(n, dtype=np.float64) for n in counts), indexing="ij")
    # The last dimension comes first, as in the published weights.
    angles = [position.reshape(-1, 1) * rates for position in reversed(positions)]
    embeddings = np.concatenate([part for angle in angles for part in (np.sin(angle), np.cos(angle))], axis=1)
    return np.pad(embeddings, ((0, 0), (0, width - axis_width * len(counts)))).astype(np.float32)


def embed_times(time: Array) -> Array:
    """Return sinusoidal embeddings (B, 256) of times (B) in 0..1,000."""
    half = TIME_EMBEDDING_SIZE // 2
    # In float32 and this order, as torch and diffusers compute it: another rounding changes an angle by 1e-4.
    exponents = np.float32(-math.log(10000.0)) * np.arange(half, dtype=np.float32) / np.float32(half - 1)
    rates = np.exp(exponents.astype(np.float64)).astype(np.float32)
    angles = time.astype(jnp.float32)[:, None] * rates
    return jnp.concatenate((jnp.cos(angles), jnp.sin(angles)), axis=1)


class TimeEmbedding(Module):
    """MLP over the sinusoidal embedding of the time."""

    def __init__(self, width: int) -> None:
        self.linear_1 = Linear(TIME_EMBEDDING_SIZE, width)
        self.linear_2 = Linear(width, width)

    def __call__(self, time: Array) -> Array:
        return self.linear_2(jax.nn.silu(self.linear_1(embed_times(time))))


class Attention(Module):
    """Self-attention, or cross-attention to a `context` of width `context_size`."""

    def __init__(self, width: int, num_heads: int, context_size: int | None = None) -> None:
        self.num_heads = num_heads
        self.to_q = Linear(width, width)
        self.to_k = Linear(context_size or width, width)
        self.to_v = Linear(context_size or width, width)
        self.to_out = Linear(width, width)

    def __call__(self, x: Array, context: Array | None = None, mask: Array | None = None) -> Array:
        source = x if context is None else context
        q, k, v = (
            y.reshape(*y.shape[:-1], self.num_heads, -1) for y in (self.to_q(x), self.to_k(source), self.to_v(source))
        )
        return self.to_out(attend(q, k, v, mask=mask).reshape(x.shape))


class Block(Module):
    """A DiT block with adaLN-Zero; the unit of gradient checkpointing.

    `extent` is the extent of self-attention: all patches, those of one frame ("space"), or one position over time ("time").
    """

    def __init__(self, shape: DiTShape, *, extent: str) -> None:
        width = shape.hidden_size
        self.modulation = Linear(width, 6 * width)
        self.attn = Attention(width, shape.num_heads)
        self.cross = Attention(width, shape.num_heads, shape.context_size) if shape.context_size else None
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)
        self.extent, self.num_frames = extent, shape.tokens[0]
        self.dropout = shape.dropout

    def __call__(self, x: Array, c: Array, context: Array | None, mask: Array | None) -> Array:
        """Return the new x (B, N, D); c (B, D) embeds time and class, `mask` is broadcast to (B, H, N, L)."""
        modulation = jnp.split(self.modulation(c)[:, None], 6, axis=-1)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = modulation
        attended = self._attend(_modulate(x, shift_attn, scale_attn))
        x = x + gate_attn * dropout(attended, self.dropout)
        if self.cross is not None:
            x = x + self.cross(layer_norm(x), context, mask)
        h = jax.nn.gelu(self.up(_modulate(x, shift_mlp, scale_mlp)), approximate=True)
        return x + gate_mlp * dropout(self.down(h), self.dropout)

    def _attend(self, x: Array) -> Array:
        if self.extent == "all":
            return self.attn(x)
        batch, _, width = x.shape
        grid = x.reshape(batch, self.num_frames, -1, width)
        if self.extent == "space":
            return self.attn(grid.reshape(-1, *grid.shape[2:])).reshape(x.shape)
        by_position = jnp.swapaxes(grid, 1, 2)
        attended = self.attn(by_position.reshape(-1, *by_position.shape[2:])).reshape(by_position.shape)
        return jnp.swapaxes(attended, 1, 2).reshape(x.shape)


class DiT(Module):
    """Maps a noisy sample, its time and its condition to the objective's prediction, of the sample's shape."""

    def __init__(self, shape: DiTShape) -> None:
        self.shape = shape
        width = shape.hidden_size
        values_per_patch = math.prod(shape.patch) * shape.channels
        self.embed = Linear(values_per_patch, width)
        self.time = TimeEmbedding(width)
        extents = ("space", "time") if shape.attention == "factorised" else ("all",)
        self.blocks = nnx.List([Block(shape, extent=extents[i % len(extents)]) for i in range(shape.num_layers)])
        self.modulation_out = Linear(width, 2 * width)
        self.out = Linear(width, values_per_patch)

    def __call__(
        self,
        x: Array,
        time: Array,
        *,
        vector: Array | None = None,
        context: Array | None = None,
        mask: Array | None = None,
    ) -> Array:
        """Return the prediction for x (B, *grid, C) at time (B) in 0..1,000.

        `vector` (B, D) is the class or vector condition, `context` (B, L, W) the text with `mask` (B, L) true for tokens.
        """
        shape = self.shape
        c = self.time(time)
        c = jax.nn.silu(c if vector is None else c + vector)
        h = self.embed(patchify(x, shape.patch)) + sinusoidal_positions(shape.tokens, shape.hidden_size)
        if get_compute_dtype() == jnp.bfloat16:
            h = h.astype(jnp.bfloat16)  # halves the traffic between blocks; the norms inside them stay float32
        attention_mask = mask[:, None, None, :] if mask is not None else None
        h = place_examples(h)
        for block in self.blocks:
            h = place_examples(checkpoint_block(block)(h, c, context, attention_mask))
        shift, scale = jnp.split(self.modulation_out(c)[:, None], 2, axis=-1)
        return unpatchify(self.out(_modulate(h, shift, scale)), shape.patch, shape.grid)


def layer_norm(x: Array) -> Array:
    """Layer norm in float32, without affine weights: the next layer can represent them."""
    values = x.astype(jnp.float32)
    centred = values - jnp.mean(values, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + EPSILON)).astype(x.dtype)


def _modulate(x: Array, shift: Array, scale: Array) -> Array:
    return layer_norm(x) * (1 + scale) + shift


def patchify(x: Array, patch: tuple[int, ...]) -> Array:
    """Split samples (B, *grid, C) into patches (B, N, P C); patches and the positions in a patch are in row-major order."""
    num_axes = len(patch)
    counts = [side // patch_side for side, patch_side in zip(x.shape[1:-1], patch, strict=True)]
    sides = [size for pair in zip(counts, patch, strict=True) for size in pair]
    split = x.reshape(len(x), *sides, x.shape[-1])
    outer, inner = range(1, 2 * num_axes, 2), range(2, 2 * num_axes + 1, 2)
    return split.transpose(0, *outer, *inner, 2 * num_axes + 1).reshape(len(x), math.prod(counts), -1)


def unpatchify(tokens: Array, patch: tuple[int, ...], grid: tuple[int, ...]) -> Array:
    """Join patches (B, N, P C) to samples (B, *grid, C), the inverse of `patchify`."""
    num_axes = len(patch)
    counts = [side // patch_side for side, patch_side in zip(grid, patch, strict=True)]
    patches = tokens.reshape(len(tokens), *counts, *patch, -1)
    axis_order = [axis for i in range(num_axes) for axis in (1 + i, 1 + num_axes + i)]
    return patches.transpose(0, *axis_order, 2 * num_axes + 1).reshape(len(tokens), *grid, -1)
