"""Compute of training: floating-point operations of a sample, and the rate of the device at multiplying matrices."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from bottega.core.batch import batch_length, slice_batch
from bottega.core.noise import Noise
from bottega.core.types import Batch
from bottega.engines.torch.devices import move_batch
from bottega.engines.torch.sums import sum_terms

if TYPE_CHECKING:
    from bottega.engines.torch.engine import TorchEngine

NUM_COUNTED_EXAMPLES = 2
"""Examples whose operations are counted; more than one, since some losses compare examples."""
MATRIX_SIZES = {"cuda": 4096, "mps": 1024, "cpu": 512}
"""Rows of the square matrices that the rate is measured with: large enough to reach it, and still milliseconds each."""
NUM_PRODUCTS = 8


def _count_product(a: Sequence[int], b: Sequence[int], *options: Any, **more_options: Any) -> int:
    """Return the operations of a (batched) matrix product of two shapes."""
    return 2 * math.prod(a) * b[-1]


def _count_added_product(total: Sequence[int], a: Sequence[int], b: Sequence[int], *options: Any, **more: Any) -> int:
    """Return the operations of a matrix product that is added to `total`."""
    return _count_product(a, b)


# torch's own formulas raise for a product whose output has another dtype (`out_dtype`), as in the cross-entropy on a GPU.
FLOP_FORMULAS = {
    torch.ops.aten.mm: _count_product,
    torch.ops.aten.bmm: _count_product,
    torch.ops.aten.addmm: _count_added_product,
    torch.ops.aten.baddbmm: _count_added_product,
}
"""Operation -> its floating-point operations, from the shapes of its arguments."""


def measure_compute(engine: TorchEngine, batch: Batch) -> dict[str, float]:
    """Return `flops_per_sample` and `matmul_rate` in FLOP/s; nothing if the operations of the task cannot be counted.

    Weights, gradients, buffers, random numbers and the mode of the model are the same afterwards, and the peak memory is
    that of what follows.
    """
    try:
        with _restored_state(engine):
            flops = count_flops(engine, batch)
        rate = measure_matmul_rate(engine.device, engine.dtype)
    except Exception:  # any task or plugin may do what the counter cannot follow; training does not need the figure
        return {}
    finally:
        if engine.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(engine.device)
    return {"flops_per_sample": flops, "matmul_rate": rate} if flops and rate else {}


def count_flops(engine: TorchEngine, batch: Batch) -> float:
    """Return the operations of one eager forward and backward pass, divided by the number of examples.

    Counted are matrix products, convolutions and attention of torch, with what gradient checkpointing computes twice.
    """
    size = min(batch_length(batch), _choose_num_examples(engine))
    examples = slice_batch(batch, 0, size)
    counts = engine.task.counts(examples)
    device_batch = move_batch(examples, engine.device)
    rng = Noise(engine.seed, 0, torch.arange(size, device=engine.device), torch)
    trainable = [p for p in engine.model.parameters() if p.requires_grad]
    # Operations inside a compiled graph are invisible to the counter.
    with torch.compiler.set_stance("force_eager"), _open_counter() as counter:
        with engine.autocast():
            loss = sum_terms(engine.task.loss(engine.eager_models, device_batch, rng).terms, counts)
        torch.autograd.grad(loss, trainable, allow_unused=True)
    return counter.get_total_flops() / size


def _choose_num_examples(engine: TorchEngine) -> int:
    """Return the number of examples to count, which fit if those of a training step do; with `auto` one is all that is certain."""
    if engine.training.micro_batch_size == "auto":
        return 1
    return min(NUM_COUNTED_EXAMPLES, engine.micro_batch_size or NUM_COUNTED_EXAMPLES)


def _open_counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=dict(FLOP_FORMULAS))


def measure_matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations per second of large square matrix products, the best of a few."""
    size = MATRIX_SIZES[device.type]
    generator = torch.Generator(device).manual_seed(0)  # a generator of its own; and a GPU is faster on zeros
    a, b = (torch.rand((size, size), generator=generator, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    # A GPU raises its clock during the first products, and the launch of a single one would count.
    num_warmups, num_together = (NUM_PRODUCTS, 4) if device.type == "cuda" else (1, 1)
    seconds = []
    for _ in range(num_warmups + NUM_PRODUCTS):
        _wait(device)
        start = time.perf_counter()
        for _ in range(num_together):
            torch.mm(a, b, out=out)
        _wait(device)
        seconds.append((time.perf_counter() - start) / num_together)
    return 2.0 * size**3 / min(seconds[num_warmups:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@contextmanager
def _restored_state(engine: TorchEngine) -> Iterator[None]:
    """Put back the buffers, the mode and the random numbers of the models after the block."""
    buffers = [(b, b.detach().clone()) for b in engine.model.buffers()]
    modes = [(m, m.training) for m in engine.model.modules()]
    devices = [engine.device] if engine.device.type == "cuda" else []
    if not engine.model.training:
        engine.model.train()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, is_training in modes:
            module.training = is_training
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
