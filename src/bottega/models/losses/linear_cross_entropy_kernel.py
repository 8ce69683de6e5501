"""Triton kernel of the linear cross-entropy: each program computes loss and gradient of one row of logits.

A program passes over its row twice, the second time mostly from the L2 cache: for an online logsumexp, then for softmax -
onehot in place, times the derivative of a cap of the logits. A single pass with the row in registers took twice as long: one
program then fills a multiprocessor, and nothing computes while it loads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, MAX_WARPS = 8192, 16


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _compute_row(  # type: ignore[no-untyped-def]
    logits,
    targets,
    losses,
    stride,
    vocab,
    ignore_index,
    cap,
    CAPPED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Triton interprets annotations as its own types, so the other arguments have none.
    # 64-bit offsets: a chunk of 2 ** 16 rows of 2 ** 16 logits is beyond 32 bits.
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    columns = tl.arange(0, BLOCK)
    if target == ignore_index:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, vocab, BLOCK):
                tl.store(logits + start + columns, 0.0, mask=start + columns < vocab)
        return
    # Read before anything is overwritten; the reductions below synchronise the warps.
    target_logit = tl.load(logits + target).to(tl.float32)
    if CAPPED:
        target_logit = cap * _tanh(target_logit / cap)
    highest = float("-inf")
    total = 0.0
    for start in range(0, vocab, BLOCK):
        x = tl.load(logits + start + columns, mask=start + columns < vocab, other=float("-inf")).to(tl.float32)
        if CAPPED:
            x = tl.where(start + columns < vocab, cap * _tanh(x / cap), float("-inf"))
        new_highest = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - new_highest) + tl.sum(tl.exp(x - new_highest), 0)
        highest = new_highest
    normaliser = highest + tl.log(total)
    tl.store(losses + row, normaliser - target_logit)
    if GRADIENT:
        tl.debug_barrier()
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            x = tl.load(logits + start + columns, mask=inside, other=0.0).to(tl.float32)
            if CAPPED:
                t = _tanh(x / cap)
                g = (tl.exp(cap * t - normaliser) - tl.where(start + columns == target, 1.0, 0.0)) * (1.0 - t * t)
            else:
                g = tl.exp(x - normaliser) - tl.where(start + columns == target, 1.0, 0.0)
            tl.store(logits + start + columns, g, mask=inside)


def compute_losses_and_gradient(
    logits: Tensor, targets: Tensor, losses: Tensor, *, ignore_index: int, softcap: float | None, with_gradient: bool
) -> None:
    """Run the kernel on logits (N, V) with unit stride in V, of any float dtype, targets (N) and losses (N) in float32."""
    rows, vocab = logits.shape
    block = min(BLOCK, triton.next_power_of_2(vocab))
    _compute_row[(rows,)](
        logits,
        targets.contiguous(),
        losses,
        logits.stride(0),
        vocab,
        ignore_index,
        1.0 if softcap is None else softcap,
        CAPPED=softcap is not None,
        GRADIENT=with_gradient,
        BLOCK=block,
        num_warps=max(4, min(MAX_WARPS, block // 256)),
    )
