"""Estimate of the memory that training a model needs, from its shape, before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from bottega.config.optimizers import FALLBACK_OPTIMIZER, OPTIMIZER_SPECS, is_hidden_matrix
from bottega.config.parameter_groups import resolve_parameter_settings
from bottega.config.training import Optimizer, Training
from bottega.core.errors import OutOfMemory
from bottega.core.task import Task
from bottega.engines.backend import MemoryEstimate, ModelPart
from bottega.engines.host_memory import get_available_memory
from bottega.engines.parts import count_parts
from bottega.models.build import MetaBuildFailed, build_meta_models_with_frozen
from bottega.world import World

GIB = 1 << 30


def estimate_memory(task: Task, training: Training, *, seed: int, is_frozen: bool = False) -> MemoryEstimate:
    """Return the least memory that training needs; only the weights if `is_frozen`, or if only the model's files are known."""
    models = _build_models(task, seed)
    if models is None:
        size = sum(_list_file_sizes(task))
        return MemoryEstimate(num_parameters=size // 4, weights=size)
    tensors = {id(t): t for model in models.values() for t in (*model.parameters(), *model.buffers())}.values()
    named_parameters = dict(models["model"].named_parameters())
    weights, num_parameters = sum(map(_count_bytes, tensors)), sum(p.numel() for p in named_parameters.values())
    if is_frozen:
        return MemoryEstimate(num_parameters, weights)
    names = _list_trainable_names(task, training, list(named_parameters))
    trainable = {name: named_parameters[name] for name in names}
    gradients = sum(map(_count_bytes, trainable.values()))
    optimizer_state = sum(
        _estimate_state_bytes(name, parameter, training.optimizer) for name, parameter in trainable.items()
    )
    return MemoryEstimate(
        num_parameters,
        weights,
        gradients,
        optimizer_state,
        average=gradients if training.ema is not None else 0,
        saved_weights=sum(_count_bytes(p) for name, p in named_parameters.items() if task.is_trainable(name)),
    )


def _build_models(task: Task, seed: int) -> Mapping[str, nn.Module] | None:
    try:
        return build_meta_models_with_frozen(task, seed)
    except MetaBuildFailed:
        return None


def _list_trainable_names(task: Task, training: Training, names: list[str]) -> list[str]:
    """Return the parameters that are trained at some step: neither the task nor the recipe freezes them for good."""
    settings = resolve_parameter_settings(training, names, is_trainable=task.is_trainable)
    return [name for name in names if settings[name].scale is not None]


def list_parts(task: Task, training: Training, *, seed: int) -> list[ModelPart]:
    """Return each model of a task and the parts that a person would name; nothing if only the model's files are known."""
    parts: list[ModelPart] = []
    for name, model in (_build_models(task, seed) or {}).items():
        counts = {path: parameter.numel() for path, parameter in model.named_parameters()}
        trainable_paths = _list_trainable_names(task, training, list(counts)) if name == "model" else []
        trainable = {path: counts[path] for path in trainable_paths}
        parts += count_parts(name, counts, trainable)
    return parts


def check_memory(estimate: MemoryEstimate, device: torch.device) -> None:
    """Raise OutOfMemory, before anything is allocated, if the model does not fit on the device."""
    num_local = World.from_environment().local_size  # processes that share the memory of the host
    free = get_available_memory() // num_local
    needed, memory_kind = estimate.total, "memory"
    if device.type == "cuda":
        if estimate.weights <= free:  # the model is built on the host
            free, memory_kind = torch.cuda.mem_get_info(device)[0], f"memory on {device}"
        else:
            needed = estimate.weights
    if needed <= free:
        return
    parts = {
        "weights": estimate.weights,
        "gradients": estimate.gradients,
        "optimizer": estimate.optimizer,
        "average": estimate.average,
    }
    sizes = " + ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    per_process = f" for each of {num_local} processes" if num_local > 1 else ""
    raise OutOfMemory(
        f"out of memory before the first step: the model has {estimate.num_parameters:,} parameters and needs {sizes} GiB, "
        f"but {free / GIB:.1f} GiB of {memory_kind} are free{per_process}; use a smaller model, or train a part of it (techniques: lora)"
    )


def _estimate_state_bytes(name: str, parameter: Tensor, options: Optimizer) -> int:
    """Return the bytes of optimizer state of one parameter."""
    spec, size = OPTIMIZER_SPECS[options.name], _count_bytes(parameter)
    if spec.is_for_hidden_matrices_only and not is_hidden_matrix(name, parameter.dim()):
        spec = OPTIMIZER_SPECS[FALLBACK_OPTIMIZER]
    if spec.is_factored and parameter.dim() >= 2:
        rows, columns = parameter.shape[-2:]
        return size // (rows * columns) * (rows + columns) if rows * columns else 0
    if spec.is_factored:
        return size
    return (
        spec.num_state_tensors * size
        if spec.state_requires_option is None or getattr(options, spec.state_requires_option)
        else 0
    )


def _list_file_sizes(task: Task) -> Iterator[int]:
    """Yield the sizes of the weight files in the folders that a task names, unless they are quantised while loading."""
    if getattr(task, "precision", None) in ("8bit", "4bit"):
        return
    for field in type(task).model_fields:
        value = getattr(task, field)
        if isinstance(value, Task):
            yield from _list_file_sizes(value)
        elif isinstance(value, str) and os.path.isdir(value):
            yield from (file.stat().st_size for file in Path(value).rglob("*.safetensors"))


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
