"""Stacked expert weights, and equivalent ways to apply them to tokens: a grouped kernel, a loop, and all experts at once.

N tokens   k choices of each   A = N k choices   E experts   D hidden size   I expert size
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bottega.models.device import get_device_type, is_simulated

Stacks = tuple[Tensor | None, Tensor, Tensor]
"""gate_proj, up_proj and down_proj in the computation dtype."""


class StackedExperts(nn.Module):
    """MLPs of the same shape with stacked weights; without biases, so that a routing weight of 0 contributes nothing."""

    def __init__(self, hidden_size: int, expert_size: int, num_experts: int, *, activation: str) -> None:
        super().__init__()
        self.activation = activation
        up_shape, down_shape = (num_experts, expert_size, hidden_size), (num_experts, hidden_size, expert_size)
        self.gate_proj = nn.Parameter(torch.empty(up_shape)) if activation == "swiglu" else None
        self.up_proj = nn.Parameter(torch.empty(up_shape))
        self.down_proj = nn.Parameter(torch.empty(down_shape))
        for weight in self.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return (N, D): for each token of x (N, D) the sum over its choices of weight * expert(token).

        `chosen` (N, k) are the experts of each token, `weights` (N, k) their routing weights.
        """
        dtype = _get_compute_dtype(x)
        x = x.to(dtype)
        if not len(x):
            return x
        gate_proj = None if self.gate_proj is None else self.gate_proj.to(dtype)
        stacks = gate_proj, self.up_proj.to(dtype), self.down_proj.to(dtype)
        if can_use_grouped_mm(x, self.down_proj):
            return dispatch_sorted(x, chosen, weights, stacks, run=run_grouped)
        return _dispatch_in_loop(x, chosen, weights, stacks)

    def can_capture_graph(self, x: Tensor) -> bool:
        """Return whether a forward with these tokens can be part of one compiled graph."""
        return can_use_grouped_mm(x, self.down_proj)

    def extra_repr(self) -> str:
        experts, size, width = self.up_proj.shape
        return f"{experts} experts, {width} -> {size} -> {width}, {self.activation}"


def can_use_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Return whether one kernel can compute all experts: bfloat16 on CUDA, with rows of a multiple of 16 bytes."""
    is_aligned = all(size * torch.bfloat16.itemsize % 16 == 0 for size in weight.shape[1:])
    return get_device_type(x.device) == "cuda" and _get_compute_dtype(x) is torch.bfloat16 and is_aligned


def _get_compute_dtype(x: Tensor) -> torch.dtype:
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


@torch.compiler.disable
def _dispatch_in_loop(x: Tensor, chosen: Tensor, weights: Tensor, stacks: Stacks) -> Tensor:
    """Dispatch outside of a compiled graph: a loop over experts needs the number of tokens of each on the host.

    Computing all experts for all tokens would compile, at E / k times the work.
    """
    return dispatch_sorted(x, chosen, weights, stacks, run=run_loop)


def gated_activation(gate: Tensor | None, up: Tensor, weight: Tensor) -> Tensor:
    """Return the inner activation, (rows, I), times the routing weight (rows, 1).

    `gate` and `up` (rows, I) are the outputs of gate_proj and up_proj. The weight is applied here rather than to the
    expert's output (rows, D), because for one choice I is smaller than D.
    """
    activation = F.gelu(up) if gate is None else F.silu(gate) * up
    return (activation * weight).to(up.dtype)


def dispatch_sorted(
    x: Tensor, chosen: Tensor, weights: Tensor, stacks: Stacks, *, run: Callable[..., Tensor]
) -> Tensor:
    """Sort choices by expert, so that each expert's tokens are contiguous, apply `run`, and sum over each token's choices."""
    k, device = chosen.shape[-1], x.device
    sorted_experts, order = chosen.flatten().sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
    expert_ids = torch.arange(len(stacks[1]), device=device)
    ends = torch.searchsorted(sorted_experts, expert_ids, right=True, out_int32=True)
    rows = _GatherSorted.apply(x, order, inverse, k)
    out = run(rows, _GatherSorted.apply(weights.reshape(-1, 1), order, inverse, 1), stacks, ends)
    return _SumChoices.apply(out, order, inverse, k)


def run_grouped(x: Tensor, weight: Tensor, stacks: Stacks, ends: Tensor) -> Tensor:
    """Apply each expert to its rows of x (A, D), which end at `ends` (E), with one kernel; `weight` (A, 1) is per row.

    No shape depends on the choices.
    """
    grouped_mm: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm  # F.grouped_mm since torch 2.10

    def multiply(rows: Tensor, stack: Tensor) -> Tensor:
        return grouped_mm(rows, stack.transpose(-2, -1), offs=ends)

    gate_proj, up_proj, down_proj = stacks
    gate = None if gate_proj is None else multiply(x, gate_proj)
    return multiply(gated_activation(gate, multiply(x, up_proj), weight), down_proj)


def run_loop(x: Tensor, weight: Tensor, stacks: Stacks, ends: Tensor) -> Tensor:
    """Apply one expert after the other to its rows; equal to `run_grouped`."""
    bounds = [0, *_fetch_ends(ends, len(x))]
    sizes = [end - start for start, end in itertools.pairwise(bounds)]
    # unbind, since the gradient of each `stack[e]` would be as large as the stack.
    by_expert = [[None] * len(sizes) if stack is None else stack.unbind(0) for stack in stacks]
    outputs = []
    for rows, row_weights, gate_proj, up_proj, down_proj in zip(
        x.split(sizes), weight.split(sizes), *by_expert, strict=True
    ):
        if len(rows):
            gate = None if gate_proj is None else F.linear(rows, gate_proj)
            outputs.append(F.linear(gated_activation(gate, F.linear(rows, up_proj), row_weights), down_proj))
    return torch.cat(outputs)


def _fetch_ends(ends: Tensor, num_rows: int) -> list[int]:
    """Return `ends` on the host; in a simulated step, where it has no values, as many rows for each expert."""
    if is_simulated():
        return [num_rows * (number + 1) // len(ends) for number in range(len(ends))]
    return [int(end) for end in ends.tolist()]


def dispatch_on_device(x: Tensor, chosen: Tensor, weights: Tensor, stacks: Stacks) -> Tensor:
    """Dispatch the few tokens of a decoding step, which is bound by reading weights.

    No shape depends on the choices and nothing waits for the host, so the step can be a CUDA graph in any precision.
    """
    # A copy of the chosen weights is read, written and read again.
    if 3 * chosen.numel() < len(stacks[1]):
        return _apply_copied_experts(x, chosen, weights, stacks)
    return _apply_all_experts(x, chosen, weights, stacks)


def _apply_copied_experts(x: Tensor, chosen: Tensor, weights: Tensor, stacks: Stacks) -> Tensor:
    """Multiply each token by copies of the weights of its experts."""
    indices, k = chosen.flatten(), chosen.shape[1]
    tokens = x.repeat_interleave(k, dim=0)[:, None]
    gate_proj, up_proj, down_proj = (None if stack is None else stack[indices].transpose(1, 2) for stack in stacks)
    assert up_proj is not None
    assert down_proj is not None
    gate = None if gate_proj is None else tokens @ gate_proj
    inner = gated_activation(gate, tokens @ up_proj, weights.reshape(-1, 1, 1))
    return (inner @ down_proj).unflatten(0, (-1, k)).sum((1, 2))


def _apply_all_experts(x: Tensor, chosen: Tensor, weights: Tensor, stacks: Stacks) -> Tensor:
    """Apply every expert to every token, with a routing weight of 0 where it is not chosen."""
    gate_proj, up_proj, down_proj = stacks
    num_experts = len(up_proj)
    by_expert = weights.new_zeros(len(x), num_experts).scatter(1, chosen, weights).t()[..., None]
    tokens = x.expand(num_experts, *x.shape)
    gate = None if gate_proj is None else tokens @ gate_proj.transpose(1, 2)
    inner = gated_activation(gate, tokens @ up_proj.transpose(1, 2), by_expert)
    return (inner @ down_proj.transpose(1, 2)).sum(0)


class _GatherSorted(torch.autograd.Function):
    """The token of each choice, (A, D), sorted by expert.

    The gradient of indexing sums in varying order on a GPU. The sorted choices are a permutation, so this backward can be
    indexing by its inverse: deterministic, without atomic additions.
    """

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        return x.index_select(0, order // k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, inverse, ctx.k = inputs
        ctx.save_for_backward(inverse)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse).unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _SumChoices(torch.autograd.Function):
    """The sum over the choices of each token, (N, D): the transpose of `_GatherSorted`."""

    @staticmethod
    def forward(y: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        return y.index_select(0, inverse).unflatten(0, (-1, k)).sum(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, order, _, ctx.k = inputs
        ctx.save_for_backward(order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, order // ctx.k), None, None, None
