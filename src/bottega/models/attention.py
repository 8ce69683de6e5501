"""Multi-head attention with rotary positions, and the positions and masks of one forward.

B batch   T tokens   S keys   D hidden size   H query heads   K key-value heads   h head size
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from bottega.models.decoder.config import TransformerShape
from bottega.models.device import get_device_type

Mask = Tensor | BlockMask | None
"""True for keys that a query may attend to; None is plain causal attention, which has the fastest kernels."""


@dataclass(frozen=True)
class SequenceContext:
    """Positions, masks and cache range of the tokens of one forward.

    `start` is the position of the first token: an integer for all rows, or a tensor (B) if rows start at
    different positions.
    `stop` is the end of the cache range: keys and values before this position are attended to.
    """

    cos: Tensor
    """Cosine of each rotary angle, (T, h), or (B, 1, T, h) if rows start at different positions; `sin` likewise."""
    sin: Tensor
    mask: Mask = None
    is_causal: bool = True
    start: int | Tensor = 0
    stop: int = 0
    documents: Tensor | None = None
    """Document ids (B, T) for state-space layers, which have no mask: no information passes between documents."""
    lengths: Tensor | None = None
    """Number of tokens of each row (B) without padding on the right, for state-space layers."""
    token_mask: Tensor | None = None
    """True (B, T) for tokens that enter the statistics of experts."""
    tokens: Tensor | None = None
    """Token ids (B, T) for layers with value embeddings."""


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32 even under autocast."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.epsilon).to(x.dtype)


def compute_rotary_tables(shape: TransformerShape, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles of every position, each (context, h), for the half-split layout."""
    exponents = torch.arange(0, shape.head_size, 2, device=device, dtype=torch.float32) / shape.head_size
    positions = torch.arange(shape.context, device=device, dtype=torch.float32)
    angles = positions[:, None] * (1.0 / shape.rope_theta**exponents)[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels of x (..., T, h) by the angles of their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@functools.cache
def _compile_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _compile_create_block_mask() -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask, dynamic=False)


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, is_causal: bool, dropout: float) -> Tensor:
    """Return the attention (B, H, T, h) of q (B, H, T, h) over k, v (B, K, S, h)."""
    uses_gqa = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        # Uncompiled, FlexAttention would materialise the scores; inside a compiled block it is already fused.
        attend_flex: Any = flex_attention if torch.compiler.is_compiling() else _compile_flex_attention()
        return attend_flex(q, k, v, block_mask=mask, enable_gqa=uses_gqa)
    needs_plain_heads = q.dtype is torch.float32 or (mask is not None and torch.is_grad_enabled())
    if uses_gqa and needs_plain_heads and get_device_type(q.device) == "cuda":
        # The one kernel of a GPU for float32 or a mask takes as many key-value heads as query heads. Otherwise torch computes
        # all scores: 15.0 instead of 5.7 GiB for a model of 12 layers and 16 x 1,024 tokens.
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        uses_gqa = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal and mask is None, enable_gqa=uses_gqa
    )


def build_document_mask(documents: Tensor, *, use_flex: bool) -> Mask:
    """Return a causal mask within documents, from document ids (B, T)."""
    length = documents.shape[1]
    if not use_flex:
        is_causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
        return (is_causal & (documents[:, :, None] == documents[:, None, :]))[:, None]

    def is_visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (documents[b, q] == documents[b, k])

    return _compile_create_block_mask()(is_visible, documents.shape[0], None, length, length, device=documents.device)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, and optionally with QK-norm and an embedding added to the values."""

    def __init__(self, shape: TransformerShape, *, has_value_embedding: bool = False) -> None:
        super().__init__()
        query_size, key_size = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)
        self.qk_norm = shape.qk_norm
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_size, shape.norm_epsilon)
            self.k_norm = RMSNorm(shape.head_size, shape.norm_epsilon)
        self.value_embed = nn.Embedding(shape.vocab_size, key_size) if has_value_embedding else None
        self.head_size = shape.head_size
        self.dropout = shape.dropout

    def forward(self, x: Tensor, sequence: SequenceContext, cache: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_size)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.value_embed is not None:
            assert sequence.tokens is not None, "a layer with value embeddings needs the tokens"
            v = v + self.value_embed(sequence.tokens).view_as(v).to(v.dtype)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        # The angles are float32, so the rotation is too; half precision would blur positions that are far apart.
        q, k = (
            apply_rotary(q, sequence.cos, sequence.sin).to(v.dtype),
            apply_rotary(k, sequence.cos, sequence.sin).to(v.dtype),
        )
        if cache is not None:
            k, v = _update_cache(cache, k, v, sequence)
        dropout = self.dropout if self.training else 0.0
        attended = attend(q, k, v, mask=sequence.mask, is_causal=sequence.is_causal, dropout=dropout)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


def _update_cache(
    cache: tuple[Tensor, Tensor], k: Tensor, v: Tensor, sequence: SequenceContext
) -> tuple[Tensor, Tensor]:
    """Write new keys and values to the cache in place; return all keys and values so far."""
    for store, update in zip(cache, (k, v), strict=True):
        if isinstance(sequence.start, int):
            store[:, :, sequence.start : sequence.stop] = update
        else:
            rows = torch.arange(len(update), device=update.device)[:, None]
            positions = sequence.start[:, None] + torch.arange(update.shape[2], device=update.device)
            store[rows, :, positions] = update.transpose(1, 2).to(store.dtype)
    return cache[0][:, :, : sequence.stop].to(v.dtype), cache[1][:, :, : sequence.stop].to(v.dtype)
