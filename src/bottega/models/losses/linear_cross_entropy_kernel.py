"""Triton kernel of the linear cross-entropy: each program computes loss and gradient of one row of logits.

Two passes over the row, the second mostly from the L2 cache: an online logsumexp, then softmax - onehot in place. A single
pass with the row in registers took twice as long: one program then fills a multiprocessor, and nothing computes while it
loads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 8192, 16


@triton.jit
def _row(logits, targets, losses, stride, vocab, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # Triton interprets annotations as its own types, so the other arguments have none.
    # 64-bit offsets: a chunk of 2 ** 16 rows of 2 ** 16 logits is beyond 32 bits.
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    columns = tl.arange(0, BLOCK)
    if target == ignore_index:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for first in range(0, vocab, BLOCK):
                tl.store(logits + first + columns, 0.0, mask=first + columns < vocab)
        return
    # Read before anything is overwritten; the reductions below synchronise the warps.
    chosen = tl.load(logits + target).to(tl.float32)
    highest = float("-inf")
    total = 0.0
    for first in range(0, vocab, BLOCK):
        x = tl.load(logits + first + columns, mask=first + columns < vocab, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
        highest = higher
    normaliser = highest + tl.log(total)
    tl.store(losses + row, normaliser - chosen)
    if GRADIENT:
        tl.debug_barrier()
        for first in range(0, vocab, BLOCK):
            inside = first + columns < vocab
            x = tl.load(logits + first + columns, mask=inside, other=0.0).to(tl.float32)
            g = tl.exp(x - normaliser) - tl.where(first + columns == target, 1.0, 0.0)
            tl.store(logits + first + columns, g, mask=inside)


def losses_and_gradient(logits: Tensor, targets: Tensor, losses: Tensor, *, ignore_index: int, gradient: bool) -> None:
    """Run the kernel on logits (N, V) with unit stride in V, of any float dtype, targets (N) and losses (N) in float32."""
    rows, vocab = logits.shape
    block = min(BLOCK, triton.next_power_of_2(vocab))
    _row[(rows,)](
        logits,
        targets.contiguous(),
        losses,
        logits.stride(0),
        vocab,
        ignore_index,
        GRADIENT=gradient,
        BLOCK=block,
        num_warps=max(4, min(WARPS, block // 256)),
    )
