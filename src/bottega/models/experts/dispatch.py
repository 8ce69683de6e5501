"""The experts' weights, and two ways to take tokens through those they chose; both give the same numbers.

N tokens   k choices of each   A = N k choices   E experts   D hidden size   I expert size
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Stacks = tuple[Tensor | None, Tensor, Tensor]
"""gate_proj, up_proj and down_proj in the precision that is computed in."""


class StackedExperts(nn.Module):
    """Feed-forward nets of one form, their weights stacked. Without biases, so that a weight of 0 adds nothing at all."""

    def __init__(self, hidden_size: int, expert_size: int, num_experts: int, *, activation: str) -> None:
        super().__init__()
        self.activation = activation
        inner, outer = (num_experts, expert_size, hidden_size), (num_experts, hidden_size, expert_size)
        self.gate_proj = nn.Parameter(torch.empty(inner)) if activation == "swiglu" else None
        self.up_proj = nn.Parameter(torch.empty(inner))
        self.down_proj = nn.Parameter(torch.empty(outer))
        for weight in self.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[N, D]: for each token of x [N, D] the sum over its choices [N, k] of weight * expert(token)."""
        dtype = _precision(x)
        x = x.to(dtype)
        if not len(x):
            return x
        gate_proj = None if self.gate_proj is None else self.gate_proj.to(dtype)
        stacks = gate_proj, self.up_proj.to(dtype), self.down_proj.to(dtype)
        if grouped_product_fits(x, self.down_proj):
            return dispatch_sorted(x, chosen, weights, stacks, run=run_grouped)
        return _uncompiled(x, chosen, weights, stacks)

    def can_capture_graph(self, x: Tensor) -> bool:
        """Whether a forward with these tokens can be compiled as a part of one graph."""
        return grouped_product_fits(x, self.down_proj)

    def extra_repr(self) -> str:
        experts, size, width = self.up_proj.shape
        return f"{experts} experts, {width} -> {size} -> {width}, {self.activation}"


def grouped_product_fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the device has one kernel for all experts: bfloat16 on CUDA, with rows of a multiple of 16 bytes."""
    aligned = all(size * torch.bfloat16.itemsize % 16 == 0 for size in weight.shape[1:])
    return x.device.type == "cuda" and _precision(x) is torch.bfloat16 and aligned


def _precision(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@torch.compiler.disable
def _uncompiled(x: Tensor, chosen: Tensor, weights: Tensor, stacks: Stacks) -> Tensor:
    """A loop over experts has to know on the host how many tokens each has, which a compiled graph cannot: it is left for
    that. All experts for all tokens would be a graph, and E / k times the work."""
    return dispatch_sorted(x, chosen, weights, stacks, run=looped)


def gated_activation(gate: Tensor | None, up: Tensor, weight: Tensor) -> Tensor:
    """The activation, already weighed: I numbers of a token are fewer than D, and the sum over choices is then plain."""
    active = F.gelu(up) if gate is None else F.silu(gate) * up
    return (active * weight).to(up.dtype)


def dispatch_sorted(
    x: Tensor, chosen: Tensor, weights: Tensor, stacks: Stacks, *, run: Callable[..., Tensor]
) -> Tensor:
    """Choices in the order of their experts, so that each expert's tokens lie side by side."""
    k, device = chosen.shape[-1], x.device
    experts, order = chosen.flatten().sort(stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
    every = torch.arange(len(stacks[1]), device=device)
    ends = torch.searchsorted(experts, every, right=True, out_int32=True)
    spread = _Spread.apply(x, order, back, k)
    out = run(spread, _Spread.apply(weights.reshape(-1, 1), order, back, 1), stacks, ends)
    return _Collect.apply(out, order, back, k)


def run_grouped(x: Tensor, weight: Tensor, stacks: Stacks, ends: Tensor) -> Tensor:
    """Rows [A, D] up to ends [E] through each expert, one kernel for all. No shape depends on the choices."""
    function: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm  # the first since torch 2.10

    def product(rows: Tensor, stack: Tensor) -> Tensor:
        return function(rows, stack.transpose(-2, -1), offs=ends)

    gate_proj, up_proj, down_proj = stacks
    gate = None if gate_proj is None else product(x, gate_proj)
    return product(gated_activation(gate, product(x, up_proj), weight), down_proj)


def looped(x: Tensor, weight: Tensor, stacks: Stacks, ends: Tensor) -> Tensor:
    """The same, one expert after the other."""
    at = [0, *ends.tolist()]
    sizes = [end - start for start, end in itertools.pairwise(at)]
    # unbind, since the gradient of each `stack[e]` would be as large as the stack.
    each = [[None] * len(sizes) if stack is None else stack.unbind(0) for stack in stacks]
    found = []
    for rows, weighed, gate, up, down in zip(x.split(sizes), weight.split(sizes), *each, strict=True):
        if len(rows):
            opened = None if gate is None else F.linear(rows, gate)
            found.append(F.linear(gated_activation(opened, F.linear(rows, up), weighed), down))
    return torch.cat(found)


class _Spread(torch.autograd.Function):
    """[A, D]: the token of each choice, in the order of the experts.

    The gradient of an index adds up in any order on a GPU. As the choices are a permutation, it is an index again: the
    same bits each time, and no atomic additions.
    """

    @staticmethod
    def forward(x: Tensor, order: Tensor, back: Tensor, k: int) -> Tensor:
        return x.index_select(0, order // k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, back, ctx.k = inputs
        ctx.save_for_backward(back)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back).unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _Collect(torch.autograd.Function):
    """[N, D]: the sum over the choices of each token, the transpose of `_Spread`."""

    @staticmethod
    def forward(y: Tensor, order: Tensor, back: Tensor, k: int) -> Tensor:
        return y.index_select(0, back).unflatten(0, (-1, k)).sum(1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, order, _, ctx.k = inputs
        ctx.save_for_backward(order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, order // ctx.k), None, None, None
