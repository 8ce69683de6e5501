"""Measured memory of training: of weights, gradients, optimizer state and activations, and of a step by micro-batch size.

On a GPU the allocator reports its peak. Elsewhere there is no such number. So for a step the tensors that autograd saves for
backward are counted while they live, because these grow with the micro-batch; and the peak of a run is the process's own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bottega.core.errors import OutOfMemory
from bottega.core.types import Batch
from bottega.engines.host_memory import get_peak_resident_memory, get_resident_memory, get_total_memory
from bottega.engines.torch.devices import describe_device
from bottega.engines.torch.saved_tensors import SavedTensorMeter
from bottega.measurements import CACHED, MemoryReport, MemoryUse, ModelMemory, StepMemory

if TYPE_CHECKING:
    from bottega.engines.torch.engine import TorchEngine

NUM_TIMED_STEPS = 3
"""Timed steps whose median is taken, after a warm-up step that also builds the optimizer state."""


def measure_memory(
    engine: TorchEngine,
    make_batch: Callable[[int], Batch],
    *,
    max_micro_batch: int,
    report_progress: Callable[[int, int], None],
) -> MemoryReport:
    """Measure the memory of the weights, gradients and optimizer, and of a step at each micro-batch size."""
    steps = measure_steps(engine, make_batch, max_micro_batch=max_micro_batch, report_progress=report_progress)
    return MemoryReport(
        device=torch.cuda.get_device_name() if engine.device_type == "cuda" else "the CPU",
        models=measure_weights(engine),
        gradient_bytes=sum(_count_bytes(p) for p in engine.model.parameters() if p.requires_grad),
        optimizer_bytes=count_optimizer_bytes(engine),
        steps=steps,
    )


def measure_weights(engine: TorchEngine) -> list[ModelMemory]:
    """Return the memory of each of the task's models, the trained one first."""
    models = {"model": engine.model, **{n: m for n, m in engine.frozen.items() if n != "model"}}
    return [_measure_model(name, model) for name, model in models.items()]


def _measure_model(name: str, model: Any) -> ModelMemory:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    parameters = {id(p): p for p in model.parameters()}.values()
    bytes_by_dtype = Counter({str(t.dtype).removeprefix("torch."): 0 for t in tensors})
    for tensor in tensors:
        bytes_by_dtype[str(tensor.dtype).removeprefix("torch.")] += _count_bytes(tensor)
    return ModelMemory(
        name,
        parameters=sum(p.numel() for p in parameters),
        learning=sum(p.numel() for p in parameters if p.requires_grad),
        bytes=sum(map(_count_bytes, tensors)),
        kind=bytes_by_dtype.most_common(1)[0][0] if bytes_by_dtype else "none",
    )


def count_optimizer_bytes(engine: TorchEngine) -> int:
    """Return the bytes of the optimizer state, which exists after the first step."""
    states = [state for optimizer in engine.optimizers for state in optimizer.state.values()]
    return sum(_count_bytes(value) for state in states for value in state.values() if isinstance(value, Tensor))


def measure_use(engine: TorchEngine, *, at_peak: bool) -> MemoryUse:
    """Return the memory of this process by category: at the peak of training, or at this moment.

    Activations and workspace are the rest of the measured memory. On a CPU this is an estimate: "program" is the
    memory of the process before the model was built, and what it has loaded since counts as workspace.
    """
    device, parameters = engine.device, list(engine.model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    if at_peak and not gradients:  # between two steps there are none, but at the peak there were
        gradients = [p for p in parameters if p.requires_grad]
    categories = _measure_state(engine, gradients)
    if device.type == "cuda":
        statistics, moment = torch.cuda.memory_stats(device), "peak" if at_peak else "current"
        used, reserved = (statistics[f"{kind}_bytes.all.{moment}"] for kind in ("allocated", "reserved"))
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        used = reserved = get_peak_resident_memory() if at_peak else get_resident_memory()
        total = get_total_memory()
        categories["program"] = engine.memory_before_model
    # Resident memory is counted roughly and leaves out pages that were never written, so it may be less than the tensors.
    used = max(used, sum(categories.values()))
    categories["activations and workspace"] = used - sum(categories.values())
    if device.type == "cuda":
        categories[CACHED] = max(0, reserved - used)
    return MemoryUse(describe_device(device), used, total, categories)


def _measure_state(engine: TorchEngine, gradients: Sequence[Tensor]) -> dict[str, int]:
    """Return the bytes of the weights, their gradients and everything else that lives from step to step."""
    infos = engine.parameters()
    trainable = {id(p): p for name, p in engine.model.named_parameters() if infos[name].is_trainable}
    models = (engine.model, *engine.frozen.values())
    tensors = {id(t): t for model in models for t in (*model.parameters(), *model.buffers())}
    weights = sum(map(_count_bytes, trainable.values()))
    return {
        "weights": weights,
        "frozen weights": sum(map(_count_bytes, tensors.values())) - weights,
        "gradients": sum(map(_count_bytes, gradients)),
        "optimizer": count_optimizer_bytes(engine),
        "averaged weights": sum(map(_count_bytes, engine.state().get("ema.safetensors", {}).values())),
        "task state": sum(map(_count_bytes, engine.task_state().values())),
    }


def measure_steps(
    engine: TorchEngine,
    make_batch: Callable[[int], Batch],
    *,
    max_micro_batch: int,
    report_progress: Callable[[int, int], None],
) -> list[StepMemory]:
    """Measure micro-batches of 1, 2, 4, ... up to `max_micro_batch`, until one does not fit. Changes the weights."""
    sizes = [1 << power for power in range(max_micro_batch.bit_length()) if 1 << power < max_micro_batch] + [
        max_micro_batch
    ]
    steps: list[StepMemory] = []
    for number, size in enumerate(sizes):
        report_progress(number, len(sizes))
        try:
            steps.append(_measure_step(engine, make_batch(size), size))
        except OutOfMemory:
            if engine.device.type == "cuda":
                torch.cuda.empty_cache()
            break
    report_progress(len(sizes), len(sizes))
    return steps


def _measure_step(engine: TorchEngine, batch: Batch, size: int) -> StepMemory:
    is_gpu = engine.device.type == "cuda"
    engine.fetch(engine.train_step(0, batch))
    if is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds, meter = [], SavedTensorMeter((engine.model, *engine.frozen.values()))
    for step in range(1, NUM_TIMED_STEPS + 1):
        with nullcontext() if is_gpu or step > 1 else meter.counting():
            start = time.perf_counter()
            engine.fetch(engine.train_step(step, batch))
            seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if is_gpu else meter.peak_bytes
    reserved = torch.cuda.max_memory_reserved() if is_gpu else 0
    # The step in which tensors were counted is slower, so it is left out.
    return StepMemory(size, peak, reserved, size / sorted(seconds[0 if is_gpu else 1 :])[(NUM_TIMED_STEPS - 1) // 2])


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
