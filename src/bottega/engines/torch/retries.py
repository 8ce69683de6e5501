"""Gradients of a step, computed again if that fails: in smaller micro-batches if memory is full, eagerly if the compiler fails.

The weights are not updated before the gradients are complete, and noise and dropout are functions of the step, so that a
repeated step is the one that would have been computed in the first place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bottega.core.batch import slice_batch
from bottega.core.types import Batch
from bottega.engines.torch import micro_batches
from bottega.engines.torch.compiler_errors import describe_compiler_error, may_be_compiler_error

if TYPE_CHECKING:
    from bottega.engines.torch.engine import TorchEngine

ANOTHER_RANK = "the compiler failed on another rank"


def compute_gradients(
    engine: TorchEngine, step: int, batch: Batch, counts: Mapping[str, float], size: int, *, may_halve: bool
) -> tuple[Tensor, dict[str, Any]]:
    """Compute the gradients of a step over this rank's `size` examples; return the loss and the metrics."""
    compiler_error: str | None = None
    while True:
        try:
            loss, metrics = engine.backward(step, batch, counts, size)
            metrics |= engine.finish_gradients(step)
            break
        except Exception as error:
            # With several ranks, the others wait for the gradients of this one; `try_on_all_ranks` has run before.
            if engine.is_compiled and engine.world_size == 1 and may_be_compiler_error(error):
                # Only the text: the error refers to the tensors of the failed step, which would stay in memory.
                compiler_error = describe_compiler_error(error)
            else:
                if compiler_error is not None:
                    error.add_note(f"the compiled step had failed too: {compiler_error}")
                micro_batches.halve_micro_batch(engine, size, error, is_allowed=may_halve)
        if engine.is_compiled and compiler_error is not None:
            engine.stop_compiling()
    engine.compile_error = compiler_error or engine.compile_error
    return loss, metrics


def try_on_all_ranks(engine: TorchEngine, step: int, batch: Batch, counts: Mapping[str, float], size: int) -> None:
    """Compute one micro-batch before the first compiled step of several ranks; if the compiler fails on one, none compiles.

    A rank that failed inside a collective would leave the others waiting.
    """
    engine.model.train()
    micro_batch_size = min(engine.micro_batch_size or size, size)
    compiler_error: str | None = None
    try:
        with engine.without_sync():
            engine.backward(step, slice_batch(batch, 0, micro_batch_size), counts, micro_batch_size)
    except Exception as error:  # memory that is full is left to the step itself
        if may_be_compiler_error(error):
            compiler_error = describe_compiler_error(error)
        elif not micro_batches.is_out_of_memory(error):
            raise
    engine.model.zero_grad(set_to_none=True)
    if engine.any_rank(compiler_error is not None):
        engine.compile_error = compiler_error or ANOTHER_RANK
        engine.stop_compiling()
