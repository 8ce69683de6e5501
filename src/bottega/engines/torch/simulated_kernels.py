"""Operations whose kernel on a GPU saves less for backward than that of the CPU, for steps that are simulated on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def simulated_kernels() -> Iterator[None]:
    """Replace torch.nn.functional.rms_norm in this block, which a GPU computes with one kernel in each direction.

    Not by a torch function mode: it is off in the backward pass, where gradient checkpointing computes a block again.
    """
    original = F.rms_norm
    F.rms_norm = _simulate_rms_norm
    try:
        yield
    finally:
        F.rms_norm = original


def _simulate_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return _RMSNorm.apply(input, weight)


class _RMSNorm(torch.autograd.Function):
    """Allocates and saves what the kernel does: the input and one number per row. The values are meaningless."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)
