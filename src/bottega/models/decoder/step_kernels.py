"""Triton kernels of a decoding step: what lies between two matrix products in one kernel, where torch needs four to twelve.

At one row each kernel of a captured graph takes about 3 us, however little it computes. They compute in float32 and round their
results only.

B rows   D hidden size   H query heads   K key-value heads   h head size   S positions in the cache
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_SIZE = 1024


# Triton reads annotations as its own types, so the arguments have none except for constants.
@triton.jit
def _add_and_normalise(  # type: ignore[no-untyped-def]
    x, delta, weight, total, normed, width, epsilon, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + start + columns, mask=inside, other=0.0).to(tl.float32)
        value = value.to(total.dtype.element_ty)
        tl.store(total + start + columns, value, mask=inside)
        value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + epsilon)
    gain = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(normed + start + columns, value * scale * gain, mask=inside)


def add_and_normalise(x: Tensor, delta: Tensor | None, weight: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return x + delta and its root mean square norm times `weight` (D) in float32, both (B, D)."""
    rows, width = x.shape
    dtype = x.dtype if delta is None else torch.promote_types(x.dtype, delta.dtype)
    normed = torch.empty((rows, width), dtype=dtype, device=x.device)
    total = x if delta is None else torch.empty_like(normed)
    block = triton.next_power_of_2(width)
    _add_and_normalise[(rows,)](
        x.contiguous(),
        x if delta is None else delta.contiguous(),
        weight,
        total,
        normed,
        width,
        epsilon,
        HAS_DELTA=delta is not None,
        BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
    )
    return total, normed


@triton.jit
def _rotate_and_store(  # type: ignore[no-untyped-def]
    heads,
    values,
    norm_weight,
    cos,
    sin,
    positions,
    queries,
    key_cache,
    value_cache,
    row_stride,
    value_stride,
    cache_row_stride,
    cache_head_stride,
    num_heads,
    num_kv_heads,
    epsilon,
    HEAD_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channels = tl.arange(0, BLOCK)
    inside = channels < HEAD_SIZE
    position = tl.load(positions + row)
    cache_start = row * cache_row_stride + position * HEAD_SIZE
    if head >= num_heads + num_kv_heads:
        kv_head = head - num_heads - num_kv_heads
        value = tl.load(values + row * value_stride + kv_head * HEAD_SIZE + channels, mask=inside)
        tl.store(value_cache + cache_start + kv_head * cache_head_stride + channels, value, mask=inside)
    else:
        partners = tl.where(channels < HEAD_SIZE // 2, channels + HEAD_SIZE // 2, channels - HEAD_SIZE // 2)
        start = row * row_stride + head * HEAD_SIZE
        x = tl.load(heads + start + channels, mask=inside, other=0.0).to(tl.float32)
        partner = tl.load(heads + start + partners, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(x * x, 0) / HEAD_SIZE + epsilon)
            x = x * scale * tl.load(norm_weight + head * HEAD_SIZE + channels, mask=inside, other=0.0)
            partner = partner * scale * tl.load(norm_weight + head * HEAD_SIZE + partners, mask=inside, other=0.0)
        angle = position * HEAD_SIZE + channels
        rotated = x * tl.load(cos + angle, mask=inside, other=0.0) + partner * tl.load(
            sin + angle, mask=inside, other=0.0
        )
        if head < num_heads:
            tl.store(queries + (row * num_heads + head) * HEAD_SIZE + channels, rotated, mask=inside)
        else:
            kv_head = head - num_heads
            tl.store(key_cache + cache_start + kv_head * cache_head_stride + channels, rotated, mask=inside)


def rotate_and_store(
    heads: Tensor,
    values: Tensor,
    norm_weight: Tensor | None,
    *,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_heads: int,
    epsilon: float,
) -> Tensor:
    """Normalise and rotate queries and keys, write keys and values to the cache, and return the queries (B, H, h).

    `heads` (B, H + K or more, h) are queries, then keys; `values` (B, K, h); `norm_weight` (H + K, h) is float32, or None
    without a norm; `cos` and `sin` (S, h) have the sign of the rotation; `positions` (B); both caches (B, K, S, h) are contiguous.
    """
    rows, num_kv_heads, head_size = values.shape
    queries = torch.empty((rows, num_heads, head_size), dtype=heads.dtype, device=heads.device)
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert heads.stride()[1:] == values.stride()[1:] == (head_size, 1)
    _rotate_and_store[(rows, num_heads + 2 * num_kv_heads)](
        heads,
        values,
        cos if norm_weight is None else norm_weight,
        cos,
        sin,
        positions,
        queries,
        key_cache,
        value_cache,
        heads.stride(0),
        values.stride(0),
        key_cache.stride(0),
        key_cache.stride(1),
        num_heads,
        num_kv_heads,
        epsilon,
        HEAD_SIZE=head_size,
        HAS_NORM=norm_weight is not None,
        BLOCK=triton.next_power_of_2(head_size),
        num_warps=1,
    )
    return queries


@triton.jit
def _gate(gate_and_up, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_and_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_and_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, gate * tl.sigmoid(gate) * up, mask=inside)


def gate(gate_and_up: Tensor) -> Tensor:
    """Return silu(gate) * up (B, I) of the joined outputs (B, 2 I) of two projections."""
    rows, width = len(gate_and_up), gate_and_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_and_up.dtype, device=gate_and_up.device)
    _gate[(rows, triton.cdiv(width, BLOCK_SIZE))](gate_and_up.contiguous(), out, width, BLOCK=BLOCK_SIZE)
    return out
