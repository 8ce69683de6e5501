"""Diagonal of the empirical Fisher information: the importance of each weight for some examples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from bottega.core.noise import Noise
from bottega.core.types import Batch
from bottega.engines.torch.devices import move_batch
from bottega.engines.torch.ranks import get_data_group
from bottega.engines.torch.sums import sum_terms

if TYPE_CHECKING:
    from bottega.engines.torch.engine import TorchEngine

FISHER_STEP = -2
"""The step number of the noise, used neither by training nor by evaluations."""


def fisher_diagonal(
    engine: TorchEngine, examples: Iterable[tuple[int, Batch]], *, count: int, names: Sequence[str]
) -> dict[str, Tensor]:
    """Return, for each of the parameters `names`, the mean over `count` examples of the squared gradient of one example.

    `examples` are the examples of this rank, each a batch of one with its index among those of all ranks; the sums are
    added over ranks. Gradients are computed for one example at a time, because the square of a mean gradient is another
    quantity, without dropout, and with the current weights, not their average. `grad` is used instead of `backward`,
    which would trigger the hooks of DDP.
    """
    named_parameters = dict(engine.model.named_parameters())
    parameters = [named_parameters[name] for name in names]
    was_trainable = [p.requires_grad for p in parameters]
    squares = [torch.zeros_like(p, requires_grad=False) for p in parameters]
    engine.model.eval()
    try:
        for p in parameters:
            p.requires_grad_(True)  # parameters that are unfrozen later count too
        for number, example in examples:
            gradients = torch.autograd.grad(_compute_loss(engine, number, example), parameters, allow_unused=True)
            updated = [(s, g) for s, g in zip(squares, gradients, strict=True) if g is not None]
            torch._foreach_addcmul_([s for s, _ in updated], [g for _, g in updated], [g for _, g in updated])
    finally:
        for p, is_trainable in zip(parameters, was_trainable, strict=True):
            p.requires_grad_(is_trainable)
    if dist.is_initialized():
        for square in squares:
            dist.all_reduce(square, group=get_data_group())
    return {name: square / count for name, square in zip(names, squares, strict=True)}


def _compute_loss(engine: TorchEngine, number: int, example: Batch) -> Tensor:
    counts = engine.task.counts(example)
    device_batch = move_batch(example, engine.device, pin=engine.pin_memory)
    rng = Noise(engine.seed, FISHER_STEP, torch.tensor([number], device=engine.device), torch)
    # Not in fp16: there is no loss scale here, and small gradients are squared.
    is_bf16 = engine.dtype is torch.bfloat16
    with torch.autocast(engine.device.type, dtype=engine.dtype) if is_bf16 else contextlib.nullcontext():
        out = engine.task.loss(engine.eager_models, device_batch, rng)
        return sum_terms(out.terms, counts)
