"""Triton kernels of the state-space layer: convolution and gated norm, forward and backward, as torch operators.

Both are bound by memory bandwidth. Compiled from plain torch they took about 4.5 ms of the layer's 18 ms on an H200 at
32,768 tokens of width 2,048, and take 2 ms here: compiled, the convolution reloaded its weights for every value, and the
norm read its inputs twice. The matrix products of the scan are left to torch.

B rows   T tokens   E channels   W width of the convolution   M = B T   n channels of the norm
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_TOKENS, TILE_CHANNELS = 32, 128
"""Tokens and channels of the tile of one program of the convolution."""
BACKWARD_TILES, BACKWARD_TILE_TOKENS = 8, 16
"""Tiles per program of the convolution's backward, and tokens per tile, which are fewer because five sums per tile fill the
registers."""
MAX_CHANNELS, MAX_CONV_WIDTH = 16384, 4
"""Maximum number of channels of a norm, whose row must fit into the registers, and maximum width of a convolution."""
NORM_BACKWARD_ROWS = 16
"""Rows summed by one program of the norm's backward; fixed, so that sums do not depend on the device."""


# Triton reads annotations as its own types, so the arguments have none except for constants.
@triton.jit
def _load_shifted(x, segments, row, t, e, back, length, channels, x_time, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load x at t - back if it is in the same segment as t, else 0."""
    s = t - back
    visible = (s >= 0) & (t < length)
    if PACKED:
        segment = tl.load(segments + row * length + t, mask=visible, other=0)
        visible = visible & (tl.load(segments + row * length + s, mask=visible, other=0) == segment)
    mask = visible[:, None] & (e < channels)[None, :]
    return tl.load(x + s.to(tl.int64)[:, None] * x_time + e[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _convolve(  # type: ignore[no-untyped-def]
    x, weight, bias, segments, row, t, e, length, channels, x_time, WIDTH: tl.constexpr, PACKED: tl.constexpr
):
    total = tl.load(bias + e, mask=e < channels, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(WIDTH):
        w = tl.load(weight + e * WIDTH + k, mask=e < channels, other=0.0).to(tl.float32)
        total += w[None, :] * _load_shifted(x, segments, row, t, e, WIDTH - 1 - k, length, channels, x_time, PACKED)
    return total


@triton.jit
def _conv(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    segments,
    y,
    length,
    channels,
    x_row,
    x_time,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    TIMES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row = tl.program_id(2).to(tl.int64)
    t = tl.program_id(1) * TIMES + tl.arange(0, TIMES)
    e = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    s = _convolve(x + row * x_row, weight, bias, segments, row, t, e, length, channels, x_time, WIDTH, PACKED)
    mask = (t < length)[:, None] & (e < channels)[None, :]
    tl.store(y + (row * length + t)[:, None] * channels + e[None, :], s * tl.sigmoid(s), mask=mask)


@triton.jit
def _conv_backward_weight(  # type: ignore[no-untyped-def]
    grad,
    x,
    weight,
    bias,
    segments,
    conv_grads,
    partial_sums,
    length,
    channels,
    g_row,
    g_time,
    x_row,
    x_time,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    STEPS: tl.constexpr,
    TIMES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute the gradient before the SiLU, recomputing the sums, and this program's part of the weights' gradient.

    The latter is accumulated over STEPS tiles in registers, because summing over tokens synchronises threads.
    """
    row = tl.program_id(2).to(tl.int64)
    e = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    x += row * x_row
    inside = e < channels
    total = tl.zeros((TIMES, CHANNELS), dtype=tl.float32)
    w0, w1, w2, w3 = total, total, total, total
    for i in range(STEPS):
        t = (tl.program_id(1) * STEPS + i) * TIMES + tl.arange(0, TIMES)
        mask = (t < length)[:, None] & inside[None, :]
        s = _convolve(x, weight, bias, segments, row, t, e, length, channels, x_time, WIDTH, PACKED)
        g = tl.load(grad + row * g_row + t.to(tl.int64)[:, None] * g_time + e[None, :], mask=mask, other=0.0)
        sigma = tl.sigmoid(s)
        conv_grad = g.to(tl.float32) * sigma * (1 + s * (1 - sigma))
        tl.store(conv_grads + (row * length + t)[:, None] * channels + e[None, :], conv_grad, mask=mask)
        total += conv_grad
        w0 += conv_grad * _load_shifted(x, segments, row, t, e, 0, length, channels, x_time, PACKED)
        if WIDTH > 1:
            w1 += conv_grad * _load_shifted(x, segments, row, t, e, 1, length, channels, x_time, PACKED)
        if WIDTH > 2:
            w2 += conv_grad * _load_shifted(x, segments, row, t, e, 2, length, channels, x_time, PACKED)
        if WIDTH > 3:
            w3 += conv_grad * _load_shifted(x, segments, row, t, e, 3, length, channels, x_time, PACKED)
    partial_sums += (row * tl.num_programs(1) + tl.program_id(1)) * (WIDTH + 1) * channels + e
    tl.store(partial_sums + WIDTH * channels, tl.sum(total, 0), mask=inside)
    tl.store(partial_sums + (WIDTH - 1) * channels, tl.sum(w0, 0), mask=inside)
    if WIDTH > 1:
        tl.store(partial_sums + (WIDTH - 2) * channels, tl.sum(w1, 0), mask=inside)
    if WIDTH > 2:
        tl.store(partial_sums + (WIDTH - 3) * channels, tl.sum(w2, 0), mask=inside)
    if WIDTH > 3:
        tl.store(partial_sums + (WIDTH - 4) * channels, tl.sum(w3, 0), mask=inside)


@triton.jit
def _conv_backward_input(  # type: ignore[no-untyped-def]
    conv_grads,
    weight,
    segments,
    grad_x,
    length,
    channels,
    WIDTH: tl.constexpr,
    PACKED: tl.constexpr,
    TIMES: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute the gradient of x: the sum over the later tokens that read it."""
    row = tl.program_id(2).to(tl.int64)
    t = tl.program_id(1) * TIMES + tl.arange(0, TIMES)
    e = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = e < channels
    total = tl.zeros((TIMES, CHANNELS), dtype=tl.float32)
    for back in tl.static_range(WIDTH):
        u = t + back
        visible = u < length
        if PACKED:
            segment = tl.load(segments + row * length + t, mask=visible, other=0)
            visible = visible & (tl.load(segments + row * length + u, mask=visible, other=0) == segment)
        mask = visible[:, None] & inside[None, :]
        g = tl.load(conv_grads + (row * length + u)[:, None] * channels + e[None, :], mask=mask, other=0.0)
        w = tl.load(weight + e * WIDTH + (WIDTH - 1 - back), mask=inside, other=0.0).to(tl.float32)
        total += g.to(tl.float32) * w[None, :]
    mask = (t < length)[:, None] & inside[None, :]
    tl.store(grad_x + (row * length + t)[:, None] * channels + e[None, :], total, mask=mask)


@triton.jit
def _norm(y, gate, weight, out, scale, size, y_row, gate_row, epsilon, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < size
    z = tl.load(gate + row * gate_row + e, mask=inside, other=0.0).to(tl.float32)
    gated = tl.load(y + row * y_row + e, mask=inside, other=0.0).to(tl.float32) * z * tl.sigmoid(z)
    factor = 1 / tl.sqrt(tl.sum(gated * gated, 0) / size + epsilon)
    w = tl.load(weight + e, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + e, gated * factor * w, mask=inside)
    tl.store(scale + row, factor)


@triton.jit
def _norm_backward(  # type: ignore[no-untyped-def]
    grad,
    y,
    gate,
    weight,
    scale,
    grad_y,
    grad_gate,
    partial_sums,
    rows,
    size,
    g_row,
    y_row,
    gate_row,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    e = tl.arange(0, BLOCK)
    inside = e < size
    w = tl.load(weight + e, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + i
        mask = inside & (row < rows)
        z = tl.load(gate + row * gate_row + e, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(y + row * y_row + e, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + row * g_row + e, mask=mask, other=0.0).to(tl.float32)
        factor = tl.load(scale + row, mask=row < rows, other=0.0)
        sigma = tl.sigmoid(z)
        unit = value * z * sigma * factor
        total += g * unit
        g = g * w
        gated_grad = factor * (g - unit * (tl.sum(g * unit, 0) / size))
        tl.store(grad_y + row * size + e, gated_grad * z * sigma, mask=mask)
        tl.store(grad_gate + row * size + e, gated_grad * value * sigma * (1 + z * (1 - sigma)), mask=mask)
    tl.store(partial_sums + tl.program_id(0) * size + e, total, mask=inside)


def conv_silu(x: Tensor, weight: Tensor, bias: Tensor, segments: Tensor | None) -> Tensor:
    """Return silu(causal convolution of x), (B, T, E).

    x (B, T, E) with unit stride in E, weight (E, 1, W), bias (E), segments (B, T): nothing is read across segments.
    """
    rows, length, channels = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(channels, TILE_CHANNELS), triton.cdiv(length, TILE_TOKENS), rows)
    segments_or_weight = weight if segments is None else segments.contiguous()  # without segments, any pointer
    width, packed = weight.shape[-1], segments is not None
    constants: dict[str, Any] = {"WIDTH": width, "PACKED": packed, "TIMES": TILE_TOKENS, "CHANNELS": TILE_CHANNELS}
    inputs = (x, weight.contiguous(), bias.contiguous(), segments_or_weight)
    _conv[grid](*inputs, y, length, channels, x.stride(0), x.stride(1), **constants)
    return y


def conv_silu_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor, segments: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias of `conv_silu`."""
    rows, length, channels = x.shape
    width = weight.shape[-1]
    grad, weight = grad if grad.stride(2) == 1 else grad.contiguous(), weight.contiguous()
    grid = (triton.cdiv(channels, TILE_CHANNELS), triton.cdiv(length, TILE_TOKENS), rows)
    conv_grads, grad_x = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    weight_grid = (grid[0], triton.cdiv(length, BACKWARD_TILE_TOKENS * BACKWARD_TILES), rows)
    partial_sums = torch.empty(rows * weight_grid[1], width + 1, channels, dtype=torch.float32, device=x.device)
    segments_or_weight = weight if segments is None else segments.contiguous()  # without segments, any pointer
    strides = (grad.stride(0), grad.stride(1), x.stride(0), x.stride(1))
    constants: dict[str, Any] = {"WIDTH": width, "PACKED": segments is not None, "CHANNELS": TILE_CHANNELS}
    inputs = (grad, x, weight, bias.contiguous(), segments_or_weight)
    _conv_backward_weight[weight_grid](
        *inputs,
        conv_grads,
        partial_sums,
        length,
        channels,
        *strides,
        STEPS=BACKWARD_TILES,
        TIMES=BACKWARD_TILE_TOKENS,
        **constants,
    )
    _conv_backward_input[grid](
        conv_grads, weight, segments_or_weight, grad_x, length, channels, TIMES=TILE_TOKENS, **constants
    )
    grad_weight = partial_sums[:, :width].sum(0).t()[:, None].to(weight.dtype).contiguous()
    return grad_x, grad_weight, partial_sums[:, width].sum(0).to(bias.dtype)


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of y * silu(gate), (M, n) in y's dtype, and the scale of each row, (M,).

    y and gate (M, n) with unit stride in n, weight (n).
    """
    rows, size = y.shape
    out = torch.empty(rows, size, dtype=y.dtype, device=y.device)
    scale = torch.empty(rows, dtype=torch.float32, device=y.device)
    constants: dict[str, Any] = _choose_block(size)
    _norm[(rows,)](y, gate, weight, out, scale, size, y.stride(0), gate.stride(0), epsilon, **constants)
    return out, scale


def gated_norm_backward(
    grad: Tensor, y: Tensor, gate: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of y, gate and weight of `gated_norm`."""
    rows, size = y.shape
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    num_programs = triton.cdiv(rows, NORM_BACKWARD_ROWS)
    grad_y = torch.empty(rows, size, dtype=y.dtype, device=y.device)
    grad_gate = torch.empty(rows, size, dtype=gate.dtype, device=y.device)
    partial_sums = torch.empty(num_programs, size, dtype=torch.float32, device=y.device)
    strides = (grad.stride(0), y.stride(0), gate.stride(0))
    outputs = (grad_y, grad_gate, partial_sums)
    constants: dict[str, Any] = _choose_block(size)
    _norm_backward[(num_programs,)](
        grad, y, gate, weight, scale, *outputs, rows, size, *strides, ROWS=NORM_BACKWARD_ROWS, **constants
    )
    return grad_y, grad_gate, partial_sums.sum(0).to(weight.dtype)


def _choose_block(size: int) -> dict[str, int]:
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": max(1, min(16, block // 512))}


# Opaque to the compiler, which would otherwise fuse neighbouring operations into loads that run several times.
_CONV_SCHEMA = "(Tensor x, Tensor weight, Tensor bias, Tensor? segments) -> Tensor"
_CONV_BACKWARD_SCHEMA = (
    "(Tensor grad, Tensor x, Tensor weight, Tensor bias, Tensor? segments) -> (Tensor, Tensor, Tensor)"
)
_NORM_SCHEMA = "(Tensor y, Tensor gate, Tensor weight, float epsilon) -> (Tensor, Tensor)"
_NORM_BACKWARD_SCHEMA = "(Tensor grad, Tensor y, Tensor gate, Tensor weight, Tensor scale) -> (Tensor, Tensor, Tensor)"


def _register_operators() -> None:
    conv = torch.library.custom_op("bottega::conv_silu", conv_silu, mutates_args=(), schema=_CONV_SCHEMA)
    conv_backward = torch.library.custom_op(
        "bottega::conv_silu_backward", conv_silu_backward, mutates_args=(), schema=_CONV_BACKWARD_SCHEMA
    )
    norm = torch.library.custom_op("bottega::gated_norm", gated_norm, mutates_args=(), schema=_NORM_SCHEMA)
    norm_backward = torch.library.custom_op(
        "bottega::gated_norm_backward", gated_norm_backward, mutates_args=(), schema=_NORM_BACKWARD_SCHEMA
    )
    conv.register_fake(lambda x, weight, bias, segments: x.new_empty(x.shape))
    conv_backward.register_fake(
        lambda grad, x, weight, bias, segments: tuple(t.new_empty(t.shape) for t in (x, weight, bias))
    )
    norm.register_fake(
        lambda y, gate, weight, epsilon: (y.new_empty(y.shape), y.new_empty(len(y), dtype=torch.float32))
    )
    norm_backward.register_fake(
        lambda grad, y, gate, weight, scale: tuple(t.new_empty(t.shape) for t in (y, gate, weight))
    )

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def save_norm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:3], output[1])

    conv.register_autograd(lambda ctx, grad: (*conv_backward(grad, *ctx.saved_tensors), None), setup_context=save)
    norm.register_autograd(
        lambda ctx, grad, _: (*norm_backward(grad, *ctx.saved_tensors), None), setup_context=save_norm
    )


_register_operators()
