"""Automatic micro-batch size: halved until a step fits in memory.

A GPU reports when its memory is full. A CPU rarely does: the kernel overcommits and kills the process that uses the
memory. So on a CPU one example is measured before the first step, and the size is chosen by the free memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from bottega.core.batch import slice_batch
from bottega.core.types import Batch
from bottega.engines.host_memory import get_available_memory
from bottega.engines.out_of_memory import build_out_of_memory_error
from bottega.engines.torch.saved_tensors import SavedTensorMeter

if TYPE_CHECKING:
    from bottega.engines.torch.engine import TorchEngine

OVERHEAD_FACTOR = 1.5
"""Peak memory of a step relative to the tensors saved for backward; the rest is activation gradients and temporaries."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a GPU or on the host, where torch raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def fit_micro_batch(engine: TorchEngine, step: int, batch: Batch, counts: Mapping[str, float], size: int) -> None:
    """Set the micro-batch size before the first step if it can be determined; otherwise the first step halves it.

    `batch` is on the device and has `size` examples, those of this rank; `counts` are those of the global batch.
    """
    # Not with compile: the measurement would compile the model for a single example, and the step again for its size.
    if engine.device.type == "cpu" and not engine.is_compiled:
        _fit_on_cpu(engine, step, batch, counts, size)
    if engine.world_size > 1:
        _fit_on_all_ranks(engine, step, batch, counts, size)


def halve_micro_batch(engine: TorchEngine, size: int, error: BaseException, *, is_allowed: bool) -> None:
    """Halve the micro-batch size after an out-of-memory error, so that the step can be retried; re-raise other errors.

    The global batch, and with it the result, does not change.
    """
    if not is_out_of_memory(error):
        raise error
    micro_batch_size = min(engine.micro_batch_size or size, size)
    _halve(engine, micro_batch_size, error, is_allowed=is_allowed)


def _fit_on_cpu(engine: TorchEngine, step: int, batch: Batch, counts: Mapping[str, float], size: int) -> None:
    meter = SavedTensorMeter((engine.model, *engine.frozen.values()))
    engine.model.train()
    try:
        with meter.counting(), engine.without_sync():
            engine.backward(step, slice_batch(batch, 0, 1), counts, 1)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        _halve(engine, 1, error)  # raises OutOfMemory, since one example cannot be halved
    _clear_gradients(engine)
    free, micro_batch_size = get_available_memory(), size
    while micro_batch_size > 1 and engine.any_rank(
        meter.peak_bytes * micro_batch_size * engine.num_local_processes * OVERHEAD_FACTOR > free
    ):
        micro_batch_size = -(-micro_batch_size // 2)
    engine.micro_batch_size = (
        micro_batch_size  # set even if all fits, so that a resumed run uses the same size on a busier machine
    )


def _fit_on_all_ranks(engine: TorchEngine, step: int, batch: Batch, counts: Mapping[str, float], size: int) -> None:
    """Find the size that fits on all ranks before the first step.

    A rank that ran out of memory inside a collective would leave the others waiting.
    """
    engine.micro_batch_size = engine.micro_batch_size or size
    engine.model.train()
    while True:
        error: BaseException | None = None
        micro_batch_size = engine.micro_batch_size
        try:
            with engine.without_sync():
                engine.backward(step, slice_batch(batch, 0, micro_batch_size), counts, micro_batch_size)
        except (RuntimeError, MemoryError) as caught:
            if not is_out_of_memory(caught):
                raise
            error = caught
        if not engine.any_rank(error is not None):
            _clear_gradients(engine)
            return
        _halve(engine, micro_batch_size, error)


def _halve(engine: TorchEngine, micro_batch_size: int, error: BaseException | None, *, is_allowed: bool = True) -> None:
    if micro_batch_size == 1 or not is_allowed:
        if engine.training.micro_batch_size == "auto":
            advice = f"set training.micro_batch_size to {micro_batch_size // 2} or less"
        else:
            advice = "lower training.micro_batch_size or set it to auto"
        hint = advice if micro_batch_size > 1 else "use a smaller model or shorter samples"
        # Measured first, with the gradients and activations that the failed attempt still holds.
        memory = engine.memory_use(at_peak=False)
        _clear_gradients(engine)
        raise build_out_of_memory_error(memory, f"with a micro-batch of {micro_batch_size}", advice=hint) from error
    _clear_gradients(engine)
    engine.micro_batch_size = -(-micro_batch_size // 2)
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()


def _clear_gradients(engine: TorchEngine) -> None:
    for parameter in engine.model.parameters():
        parameter.grad = None
