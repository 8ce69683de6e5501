"""Cross-entropy over a vocabulary, fused with the output layer so that the logits are never materialised as a whole.

N rows   D hidden size   V vocabulary

At 64 x 1,024 tokens and a vocabulary of 50,304 the logits and their gradient would take 26 GB in float32. Here each chunk
of logits is turned into softmax - onehot in place and multiplied at once. The loss is a sum, so the backward pass only
scales the finished gradients by the incoming gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bottega.models.device import get_device_type, is_simulated

CHUNK_BYTES = {"cuda": 384 << 20, "cpu": 16 << 20}
"""Size of one chunk of logits: enough rows for an efficient matrix product, on a CPU few enough for the caches."""


def cap_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """Return c * tanh(logits / c), between -c and c, for a cap c; the logits themselves without one.

    At least in float32, as in training: near the cap, bfloat16 would make the largest logits equal.
    """
    if softcap is None:
        return logits
    return softcap * torch.tanh(logits.to(torch.promote_types(logits.dtype, torch.float32)) / softcap)


@torch.compiler.disable
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """Return the sum over rows of -log softmax(hidden @ weight.T)[target] as a float32 scalar, without ignored targets.

    hidden (N, D), weight (V, D), targets (N); `softcap` is that of `cap_logits`, `chunk_rows` the number of rows per
    chunk. Never synchronises with the device. Under autocast the products are computed in its dtype, the softmax in float32,
    and the gradient of the weight is accumulated in float32.
    """
    device_type = get_device_type(hidden.device)
    dtype = hidden.dtype
    if device_type == "cpu":
        dtype = torch.promote_types(dtype, torch.float32)
    elif torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    chunk_rows = chunk_rows or _choose_chunk_rows(
        len(hidden), weight.shape[0], itemsize=dtype.itemsize, device_type=device_type
    )
    has_grad = torch.is_grad_enabled()
    needs_grad = (has_grad and hidden.requires_grad, has_grad and weight.requires_grad)
    return _LinearCrossEntropy.apply(hidden, weight, targets, ignore_index, softcap, chunk_rows, dtype, needs_grad)


def _choose_chunk_rows(num_rows: int, vocab_size: int, *, itemsize: int, device_type: str) -> int:
    """Return the rows per chunk, for chunks of about equal size within the budget, a multiple of 128 for tensor cores."""
    budget = CHUNK_BYTES["cpu" if device_type == "cpu" else "cuda"]
    limit = max(1, budget // (vocab_size * itemsize))
    even_rows = -(-num_rows // max(1, -(-num_rows // limit)))
    return max(1, min(limit, -(-even_rows // 128) * 128))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore_index: int,
        softcap: float | None,
        chunk_rows: int,
        dtype: torch.dtype,
        needs_grad: tuple[bool, bool],
    ) -> Tensor:
        ctx.dtypes = hidden.dtype, weight.dtype
        sum_dtype = torch.promote_types(dtype, torch.float32)
        losses = torch.zeros(len(hidden), dtype=sum_dtype, device=hidden.device)
        # Autocast would cast the weight again for every chunk, and has no rule for products with a float32 result.
        with torch.autocast(hidden.device.type, enabled=False):
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            grad_hidden = torch.empty_like(hidden) if needs_grad[0] else None
            grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if needs_grad[1] else None
            for start in range(0, len(hidden), chunk_rows):
                rows = slice(start, start + chunk_rows)
                logits = torch.mm(hidden[rows], weight.T)
                _compute_losses_and_gradient(
                    logits,
                    targets[rows],
                    losses[rows],
                    ignore_index=ignore_index,
                    softcap=softcap,
                    with_gradient=any(needs_grad),
                )
                if grad_hidden is not None:
                    torch.mm(logits, weight, out=grad_hidden[rows])
                if grad_weight is not None:
                    _add_product(grad_weight, logits.T, hidden[rows])
                del logits  # before the next chunk is allocated
        ctx.save_for_backward(grad_hidden, grad_weight)
        return losses.sum()

    @staticmethod
    @once_differentiable  # gradients are computed in the forward, so a second derivative would be silently wrong
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (
            None if saved is None else saved.to(dtype) * grad.to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*gradients, None, None, None, None, None, None)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, in place. `a` and `b` may be of half precision, `total` is not."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif is_simulated() and get_device_type(a.device) == "cuda":
        total.add_(1)  # the kernel below allocates nothing
    elif a.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(torch.mm(a, b))


def _compute_losses_and_gradient(
    logits: Tensor, targets: Tensor, losses: Tensor, *, ignore_index: int, softcap: float | None, with_gradient: bool
) -> None:
    """Fill `losses` of these rows and, with `with_gradient`, turn the logits into their gradient in place.

    It is softmax - onehot, times the derivative of the cap: 1 - (capped / cap)^2.
    """
    if is_simulated() and get_device_type(logits.device) == "cuda":
        return  # the kernel below allocates nothing
    if logits.device.type == "cuda" and _has_triton():
        from bottega.models.losses.linear_cross_entropy_kernel import compute_losses_and_gradient

        compute_losses_and_gradient(
            logits, targets, losses, ignore_index=ignore_index, softcap=softcap, with_gradient=with_gradient
        )
        return
    # torch's softmax kernels are several times faster than separate logsumexp and exp, which read memory in every pass.
    float_logits, columns = cap_logits(logits.to(losses.dtype), softcap), targets.long()
    losses.copy_(F.cross_entropy(float_logits, columns, ignore_index=ignore_index, reduction="none"))
    if with_gradient:
        ignored = columns == ignore_index
        probabilities = float_logits.softmax(dim=1)
        probabilities.scatter_add_(
            1, columns.masked_fill(ignored, 0)[:, None], float_logits.new_full((len(float_logits), 1), -1.0)
        )
        if softcap is not None:
            probabilities *= 1 - (float_logits / softcap).square()
        logits.copy_(probabilities.masked_fill_(ignored[:, None], 0.0))


@functools.cache
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
