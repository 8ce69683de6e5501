"""Attention with rotary positions, and what one call of a decoder says about where its tokens stand.

B batch   T tokens   S keys a query may see   D hidden size   H query heads   K key-value heads   h head size
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

Mask = Tensor | BlockMask | None
"""True where a query may look; None is plain causal attention, which has the fastest kernels."""


@dataclass(frozen=True)
class SequenceContext:
    """Where the tokens of one call stand: the rotation of each, what each may look at, and what was read before.

    `start` is the position of the first token: an integer for all rows, or a tensor [B] when rows have read unequally.
    """

    cos: Tensor
    sin: Tensor
    mask: Mask = None
    causal: bool = True
    start: int | Tensor = 0
    stop: int = 0
    documents: Tensor | None = None
    """For layers that have no mask: ids [B, T] between which nothing passes."""
    lengths: Tensor | None = None
    """And how many tokens of each row [B] are real, where rows were filled up on the right."""
    counted: Tensor | None = None
    """True [B, T] for tokens that count in what experts report."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32 whatever the precision around it."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.epsilon).to(x.dtype)


def compute_rotary_tables(shape: TransformerShape, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, [context, h], the two halves of a head turning together."""
    exponents = torch.arange(0, shape.head_size, 2, device=device, dtype=torch.float32) / shape.head_size
    positions = torch.arange(shape.context, device=device, dtype=torch.float32)
    angles = positions[:, None] * (1.0 / shape.rope_theta**exponents)[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _compiled_block_mask() -> Callable[..., BlockMask]:
    return torch.compile(create_block_mask, dynamic=False)


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, causal: bool, dropout: float) -> Tensor:
    """q [B, H, T, h] over k, v [B, K, S, h]."""
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        # Uncompiled, FlexAttention would materialise the scores; inside a compiled block it is already fused.
        flex: Any = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
        return flex(q, k, v, block_mask=mask, enable_gqa=grouped)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None, enable_gqa=grouped
    )


def build_document_mask(documents: Tensor, *, flex: bool) -> Mask:
    """Causal, and only within the same document."""
    length = documents.shape[1]
    if not flex:
        order = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
        return (order & (documents[:, :, None] == documents[:, None, :]))[:, None]

    def same_document(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (documents[b, q] == documents[b, k])

    return _compiled_block_mask()(same_document, documents.shape[0], None, length, length, device=documents.device)


class Attention(nn.Module):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        queries, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.qk_norm = shape.qk_norm
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_size, shape.norm_epsilon)
            self.k_norm = RMSNorm(shape.head_size, shape.norm_epsilon)
        self.head_size = shape.head_size
        self.dropout = shape.dropout

    def forward(self, x: Tensor, window: SequenceContext, past: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_size)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        # The angles are float32, so the rotation is too; half precision would blur positions that are far apart.
        q, k = apply_rotary(q, window.cos, window.sin).to(v.dtype), apply_rotary(k, window.cos, window.sin).to(v.dtype)
        if past is not None:
            k, v = _remember(past, k, v, window)
        dropout = self.dropout if self.training else 0.0
        mixed = attend(q, k, v, mask=window.mask, causal=window.causal, dropout=dropout)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def _remember(past: tuple[Tensor, Tensor], k: Tensor, v: Tensor, window: SequenceContext) -> tuple[Tensor, Tensor]:
    """Write the new keys and values behind the old; give back all that were read so far."""
    for store, new in zip(past, (k, v), strict=True):
        if isinstance(window.start, int):
            store[:, :, window.start : window.stop] = new
        else:
            rows = torch.arange(len(new), device=new.device)[:, None]
            places = window.start[:, None] + torch.arange(new.shape[2], device=new.device)
            store[rows, :, places] = new.transpose(1, 2).to(store.dtype)
    return past[0][:, :, : window.stop].to(v.dtype), past[1][:, :, : window.stop].to(v.dtype)
