"""Operations whose kernel on a GPU saves less for backward than that of the CPU, for steps that are simulated on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class SimulatedKernels(TorchFunctionMode):
    """Replaces torch.nn.functional.rms_norm, which a GPU computes with one kernel in each direction."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.rms_norm:
            return _simulate_rms_norm(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _simulate_rms_norm(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return _RMSNorm.apply(x, weight)


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
