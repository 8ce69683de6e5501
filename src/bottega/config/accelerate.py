"""Configuration files of Accelerate as a layer of a recipe: precision, device and processes."""

from __future__ import annotations

from typing import Any

from bottega.config.layers import Entry, Layer, Problem

_MARKS = ("compute_environment", "distributed_type")

_STRATEGIES: dict[str, dict[str, Any]] = {
    "NO": {"distributed.enabled": False},
    "MULTI_GPU": {"distributed.strategy": "ddp"},
    "MULTI_CPU": {"distributed.strategy": "ddp", "device": "cpu"},
    "FSDP": {"distributed.strategy": "fsdp"},
}

_KEYS = {
    "mixed_precision": "training.mixed_precision",
    "num_processes": "distributed.processes",
    "num_machines": "distributed.machines",
    "machine_rank": "distributed.machine_rank",
    "main_process_ip": "distributed.main_address",
    "main_process_port": "distributed.main_port",
    "fsdp_config.fsdp_offload_params": "distributed.offload",
    "fsdp_config.fsdp_activation_checkpointing": "training.gradient_checkpointing",
}

_IGNORED_VALUES: dict[str, tuple[Any, ...]] = {
    "compute_environment": ("LOCAL_MACHINE",),
    "gpu_ids": ("all", None),
    "downcast_bf16": ("no", False),
    "tpu_env": ([],),
    "tpu_use_cluster": (False,),
    "tpu_use_sudo": (False,),
    "rdzv_backend": ("static", "c10d", ""),
    "same_network": (),
    "main_training_function": (),
    "debug": (),
    "enable_cpu_affinity": (),
}
"""Keys without a counterpart here, and the values that can be ignored; () is any."""

_REMEDY = {"gpu_ids": "set CUDA_VISIBLE_DEVICES instead"}


def is_accelerate_config(layer: Layer) -> bool:
    """Return whether a layer is an Accelerate configuration, by two keys that no recipe has."""
    return any(mark in layer.entries for mark in _MARKS)


def translate_layer(layer: Layer) -> Layer:
    """Return the layer with our keys; keys without a counterpart become notes, unsupported values problems."""
    result = Layer(lines=layer.lines, problems=list(layer.problems))
    for typed, entry in layer.entries.items():
        if typed in _KEYS:
            if entry.value is not None:
                _put(result, entry, {_KEYS[typed]: entry.value})
        elif typed == "distributed_type":
            _strategy(result, entry)
        elif typed == "use_cpu":
            _put(result, entry, {"device": "cpu"} if entry.value is True else {})
        elif typed == "dynamo_config.dynamo_backend":
            _put(result, entry, {"training.compile": str(entry.value).lower() != "no"})
        elif typed in _IGNORED_VALUES:
            if _IGNORED_VALUES[typed] and entry.value not in _IGNORED_VALUES[typed]:
                _refuse(result, entry, f"{entry.value!r} is not supported; {_REMEDY.get(typed, 'remove the line')}")
        elif typed.startswith(("fsdp_config.", "dynamo_config.")):
            result.notes.append(f"{entry.location}: {typed} has no counterpart and is ignored")
        else:
            _refuse(result, entry, "unknown key of an Accelerate configuration; remove the line")
    return result


def _strategy(result: Layer, entry: Entry) -> None:
    settings = _STRATEGIES.get(str(entry.value))
    if settings is None:
        _refuse(result, entry, f"{entry.value!r} is not supported; expected one of {', '.join(_STRATEGIES)}")
    else:
        _put(result, entry, settings)


def _put(result: Layer, entry: Entry, settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        result.entries[key] = Entry(value, entry.location, entry.typed_key)


def _refuse(result: Layer, entry: Entry, message: str) -> None:
    result.problems.append(Problem(entry.location, entry.typed_key, message, entry.typed_key))
