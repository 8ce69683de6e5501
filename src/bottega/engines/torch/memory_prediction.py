"""Predicted memory of training: two steps of the engine itself, on tensors that have shapes and lifetimes but no data.

Everything that a step allocates is counted: forward, backward, clipping, the optimizer. A GPU is not needed: tensors on the
CPU stand for those of the GPU, and compiled functions are partitioned into forward and backward as the compiler would.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bottega.config.training import Training
from bottega.core.batch import batch_length, slice_batch
from bottega.core.errors import BottegaError
from bottega.core.task import Task
from bottega.core.types import Batch
from bottega.engines.backend import resolve_precision
from bottega.engines.compile_choice import is_compilable
from bottega.engines.host_memory import get_resident_memory
from bottega.engines.torch.engine import TorchEngine
from bottega.engines.torch.memory_meter import ACTIVATIONS, CACHED_CASTS, WORKSPACE, MemoryMeter, compile_for_meter
from bottega.engines.torch.noise import forget_compiled_draws
from bottega.engines.torch.simulated_kernels import simulated_kernels
from bottega.measurements import MemoryPrediction, PredictionUnavailable
from bottega.models.build import MetaBuildFailed, build_meta_models_with_frozen
from bottega.models.device import simulated_device
from bottega.world import World

KERNEL_WORKSPACE = {"cuda": 64 << 20}
"""Bytes that cuBLAS and cuBLASLt hold for their kernels on recent GPUs, 32 MiB each."""
NUM_SIMULATED_PASSES = 2
"""Micro-batches that are simulated: in the second, the gradients of the first are there, and all others are like it."""
LATER_IMPORTS = 110 << 20
"""Bytes of what a training process loads after its model is built, measured on a CPU: metrics, trackers, checkpoints."""
HEAP_OVERHEAD = 0.15
"""Memory that the C library does not return after tensors are freed, as a fraction of all tensors, measured on a CPU."""
PROGRAM, HEAP = "program", "heap overhead"
CATEGORIES = (
    *("weights", "frozen weights", "gradients", "optimizer", "averaged weights"),
    *("batch", ACTIVATIONS, CACHED_CASTS, WORKSPACE),
)


def predict_memory(
    task: Task,
    training: Training,
    batch: Batch,
    *,
    seed: int,
    device_type: str,
    micro_batch_size: int | None = None,
) -> MemoryPrediction:
    """Return the memory of a training step with `batch` at its peak.

    `micro_batch_size` replaces that of the recipe. Raises PredictionUnavailable for a task whose step depends on values.
    """
    try:
        models = build_meta_models_with_frozen(task, seed)
        return _simulate_steps(
            task, training, batch, models, seed=seed, device_type=device_type, micro_batch_size=micro_batch_size
        )
    except MetaBuildFailed as error:
        raise PredictionUnavailable(f"a model can only be built with its weights: {error}") from error
    except (BottegaError, PredictionUnavailable):
        raise
    except Exception as error:  # any task or plugin may do what cannot be done without values
        line = next(iter(str(error).splitlines()), "")
        raise PredictionUnavailable(f"a step cannot be simulated: {type(error).__name__}: {line[:200]}") from error


def _simulate_steps(
    task: Task,
    training: Training,
    batch: Batch,
    models: Mapping[str, Any],
    *,
    seed: int,
    device_type: str,
    micro_batch_size: int | None,
) -> MemoryPrediction:
    program_memory, batch_bytes = _measure_program_memory(), _count_batch_bytes(batch)
    if micro_batch_size is not None:
        batch = slice_batch(batch, 0, min(NUM_SIMULATED_PASSES * micro_batch_size, batch_length(batch)))
    has_compiled_model = training.compile is True and is_compilable(task)  # `auto` is resolved by the caller
    settings = training.model_copy(
        update={
            "compile": has_compiled_model,
            "mixed_precision": resolve_precision(training, device_type),
            "micro_batch_size": micro_batch_size,
        }
    )
    meter = MemoryMeter()
    # In a compiled graph, the compiler decides what is saved for backward.
    kernels = simulated_kernels() if device_type == "cuda" and not has_compiled_model else nullcontext()
    fake_tensors = FakeTensorMode(allow_non_fake_inputs=True)
    with _isolated(), simulated_device(device_type), fake_tensors, meter, kernels, compile_for_meter(meter):
        with meter.category("weights"):
            trained = {"model": _replace_by_fake_tensors(models["model"])}
        with meter.category("frozen weights"):
            frozen = {name: _replace_by_fake_tensors(model) for name, model in models.items() if name != "model"}
        with meter.category("averaged weights"):
            engine = TorchEngine(
                task,
                settings,
                rate=lambda step: 1e-3,
                seed=seed,
                device="cpu",
                micro_batch_size=micro_batch_size,
                world=World(),
                models={**trained, **frozen},
            )
        for parameter in engine.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(_count_as_gradient, meter))
        engine.train_step(0, batch)  # compiles, and allocates the optimizer state
        for state in (state for optimizer in engine.optimizers for state in optimizer.state.values()):
            for value in state.values():
                if isinstance(value, Tensor):
                    meter.reclassify(value, "optimizer")
        meter.reset_peak()
        engine.train_step(1, batch)
    if engine.compile_error is not None:
        raise PredictionUnavailable(f"a compiled step cannot be simulated: {engine.compile_error}")
    categories = {name: meter.peak.get(name, 0) for name in CATEGORIES}
    categories["batch"] += batch_bytes
    categories[WORKSPACE] += KERNEL_WORKSPACE.get(device_type, 0)
    if device_type == "cpu":  # there the memory of the whole process counts
        categories[HEAP] = int(HEAP_OVERHEAD * sum(categories.values()))
        categories[PROGRAM] = program_memory + LATER_IMPORTS
    return MemoryPrediction(sum(categories.values()), categories)


@functools.cache
def _measure_program_memory() -> int:
    """Return the memory of this process before its first prediction, which imports the compiler."""
    return get_resident_memory()


@contextmanager
def _isolated() -> Iterator[None]:
    """Leave nothing behind: no compiled function, no changed random state, no log and no warning of the compiler."""
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch._functorch")]
    levels = [logger.level for logger in loggers]
    forget_compiled_draws()
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with torch.random.fork_rng(devices=()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        forget_compiled_draws()
        torch._dynamo.reset()


def _replace_by_fake_tensors(model: nn.Module) -> nn.Module:
    """Replace the parameters and buffers of a model in place by fake ones on the CPU; shared ones stay shared. Return the model."""
    fakes: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, so that its id is not used again
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in fakes:
                copy = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), parameter.requires_grad)
                fakes[id(parameter)] = parameter, copy
            setattr(module, name, fakes[id(parameter)][1])
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if id(buffer) not in fakes:
                fakes[id(buffer)] = buffer, torch.empty(buffer.shape, dtype=buffer.dtype)
            setattr(module, name, fakes[id(buffer)][1])
    return model


def _count_as_gradient(meter: MemoryMeter, parameter: Tensor) -> None:
    if parameter.grad is not None:
        meter.reclassify(parameter.grad, "gradients")


def _count_batch_bytes(batch: Mapping[str, Any]) -> int:
    return sum(
        _count_batch_bytes(value) if isinstance(value, Mapping) else np.asarray(value).nbytes
        for value in batch.values()
    )
