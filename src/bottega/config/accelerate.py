"""Configuration files of Accelerate as a layer of a recipe: precision, device and processes."""

from __future__ import annotations

from typing import Any

from bottega.config.layers import Entry, Layer, Problem

_MARKER_KEYS = ("compute_environment", "distributed_type")

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

_REMEDIES = {"gpu_ids": "set CUDA_VISIBLE_DEVICES instead"}


def is_accelerate_config(layer: Layer) -> bool:
    """Return whether a layer is an Accelerate configuration, by two keys that no recipe has."""
    return any(key in layer.entries for key in _MARKER_KEYS)


def translate_layer(layer: Layer) -> Layer:
    """Return the layer with our keys; keys without a counterpart become notes, unsupported values problems."""
    result = Layer(lines=layer.lines, problems=list(layer.problems))
    for key, entry in layer.entries.items():
        if key in _KEYS:
            if entry.value is not None:
                _add_entries(result, entry, {_KEYS[key]: entry.value})
        elif key == "distributed_type":
            _map_strategy(result, entry)
        elif key == "use_cpu":
            _add_entries(result, entry, {"device": "cpu"} if entry.value is True else {})
        elif key == "dynamo_config.dynamo_backend":
            _add_entries(result, entry, {"training.compile": str(entry.value).lower() != "no"})
        elif key in _IGNORED_VALUES:
            if _IGNORED_VALUES[key] and entry.value not in _IGNORED_VALUES[key]:
                _add_problem(
                    result, entry, f"{entry.value!r} is not supported; {_REMEDIES.get(key, 'remove the line')}"
                )
        elif key.startswith(("fsdp_config.", "dynamo_config.")):
            result.notes.append(f"{entry.location}: {key} has no counterpart and is ignored")
        else:
            _add_problem(result, entry, "unknown key of an Accelerate configuration; remove the line")
    return result


def _map_strategy(result: Layer, entry: Entry) -> None:
    settings = _STRATEGIES.get(str(entry.value))
    if settings is None:
        _add_problem(result, entry, f"{entry.value!r} is not supported; expected one of {', '.join(_STRATEGIES)}")
    else:
        _add_entries(result, entry, settings)


def _add_entries(result: Layer, entry: Entry, settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        result.entries[key] = Entry(value, entry.location, entry.typed_key)


def _add_problem(result: Layer, entry: Entry, message: str) -> None:
    result.problems.append(Problem(entry.location, entry.typed_key, message, entry.typed_key))
