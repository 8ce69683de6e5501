"""Measured memory of training in JAX: of the state by category, and of a step by micro-batch size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from bottega.core.errors import OutOfMemory
from bottega.core.types import Batch
from bottega.engines.host_memory import get_peak_resident_memory, get_resident_memory, get_total_memory
from bottega.engines.jax.devices import describe_device
from bottega.measurements import MemoryReport, MemoryUse, ModelMemory, StepMemory

if TYPE_CHECKING:
    from bottega.engines.jax.engine import JaxEngine

NUM_TIMED_STEPS = 3
"""Timed steps whose median is taken, after a step that compiles."""


def measure_use(engine: JaxEngine, *, at_peak: bool) -> MemoryUse:
    """Return the memory of this process by category: at the peak of training, or at this moment.

    Activations and workspace are the rest of the measured memory. On a CPU this is an estimate: "program" is the
    memory of the process before the model was built, and what it has loaded since counts as workspace.
    """
    state = engine.state
    trainable = [value for name, value in state.parameters.items() if name in engine.assigned]
    weights = _count_bytes(trainable)
    frozen = [value for values in engine.frozen_weights.values() for value in values.values()]
    categories = {
        "weights": weights,
        "frozen weights": _count_bytes(state.parameters.values()) - weights + _count_bytes(frozen),
        "gradients": weights if at_peak else 0,
        "optimizer": _count_bytes(jax.tree.leaves(state.optimizer)),
        "averaged weights": _count_bytes(state.average.values()),
        "task state": _count_bytes(state.task_state.values()),
    }
    statistics = engine.device.memory_stats() if engine.device_type == "cuda" else None
    if statistics:
        used = statistics["peak_bytes_in_use" if at_peak else "bytes_in_use"]
        total = statistics["bytes_limit"]
    else:
        used, total = get_peak_resident_memory() if at_peak else get_resident_memory(), get_total_memory()
        categories["program"] = engine.memory_before_model
    used = max(used, sum(categories.values()))
    categories["activations and workspace"] = used - sum(categories.values())
    return MemoryUse(describe_device(engine.device), used, total, categories)


def measure_memory(
    engine: JaxEngine,
    make_batch: Callable[[int], Batch],
    *,
    max_micro_batch: int,
    report_progress: Callable[[int, int], None],
) -> MemoryReport:
    """Measure the memory of the weights, gradients and optimizer, and of a step at each micro-batch size.

    The memory of a step is what its compiled program reserves for temporary values. Changes the weights.
    """
    sizes = [1 << power for power in range(max_micro_batch.bit_length()) if 1 << power < max_micro_batch]
    steps: list[StepMemory] = []
    for number, size in enumerate([*sizes, max_micro_batch]):
        report_progress(number, len(sizes) + 1)
        try:
            steps.append(_measure_step(engine, make_batch(size), size))
        except OutOfMemory:
            break
    report_progress(len(sizes) + 1, len(sizes) + 1)
    state = engine.state
    trainable = [value for name, value in state.parameters.items() if name in engine.assigned]
    return MemoryReport(
        device=engine.device.device_kind if engine.device_type == "cuda" else "the CPU",
        models=measure_weights(engine),
        gradient_bytes=_count_bytes(trainable),
        optimizer_bytes=_count_bytes(jax.tree.leaves(state.optimizer)),
        steps=steps,
    )


def measure_weights(engine: JaxEngine) -> list[ModelMemory]:
    """Return the memory of each of the task's models, the trained one first."""
    models = {"model": engine.state.parameters, **engine.frozen_weights}
    return [
        ModelMemory(
            name,
            parameters=sum(int(np.prod(value.shape)) for value in values.values()),
            learning=sum(
                int(np.prod(value.shape)) for key, value in values.items() if name == "model" and key in engine.assigned
            ),
            bytes=_count_bytes(values.values()),
            kind=str(next(iter(values.values())).dtype) if values else "none",
        )
        for name, values in models.items()
    ]


def _measure_step(engine: JaxEngine, batch: Batch, size: int) -> StepMemory:
    engine.fetch(engine.train_step(0, batch))
    seconds = []
    for step in range(1, NUM_TIMED_STEPS + 1):
        start = time.perf_counter()
        engine.fetch(engine.train_step(step, batch))
        seconds.append(time.perf_counter() - start)
    analysis = engine.analyse_step(batch)
    peak = int(analysis.temp_size_in_bytes) if analysis is not None else 0
    if engine.device_type == "cuda" and analysis is not None:
        peak += int(analysis.argument_size_in_bytes)
    return StepMemory(size, peak, peak, size / sorted(seconds)[NUM_TIMED_STEPS // 2])


def _count_bytes(values: Iterable[Any]) -> int:
    return sum(int(value.nbytes) for value in values)
