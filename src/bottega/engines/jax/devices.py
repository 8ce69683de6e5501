"""Devices and precisions of JAX, and the batch on the device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bottega.core.errors import MissingDevice, UsageError
from bottega.core.types import Batch

DEVICE_TYPES = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "rocm": "cuda"}
"""Platform of JAX -> type of device in a recipe."""
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


class NamedDevice:
    """A device of JAX under the name that torch gives it, or under that of its mesh."""

    def __init__(self, jax_device: Any, name: str) -> None:
        self.jax_device, self._name = jax_device, name

    def __str__(self) -> str:
        return self._name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.jax_device, attribute)


def choose_devices(name: str) -> list[Any]:
    """Return the devices of the type that a recipe's `device` names, of all processes, the one with a given number first.

    Raises an error, rather than use the CPU, if that GPU is absent.
    """
    kind, _, number = name.replace("gpu", "cuda", 1).partition(":")
    if kind not in ("auto", "cpu", "cuda"):
        choice = "mps is not available with engine=jax" if kind == "mps" else f"{name!r} is not a device"
        raise UsageError(f"device: {choice}; choose from auto, cpu, cuda")
    try:
        devices = jax.devices(None if kind == "auto" else kind)
    except (RuntimeError, AssertionError):
        platforms = os.environ.get("JAX_PLATFORMS")
        cause = f"JAX_PLATFORMS={platforms} allows none here" if platforms else "jax found no GPU"
        raise MissingDevice(
            f"device: {kind} is not available: {cause}; use device=cpu, or install jax[cuda12] for the GPU"
        ) from None
    if number and int(number) >= len(devices):
        raise MissingDevice(f"device: {name} does not exist; the last GPU is cuda:{len(devices) - 1}")
    return devices[int(number) :] if number else devices


def get_device_type(device: Any) -> str:
    """Return cpu or cuda."""
    return DEVICE_TYPES.get(device.platform, device.platform)


def describe_device(device: Any) -> str:
    """Return the device, for a GPU with its product name, such as "cuda:0 NVIDIA H200"."""
    kind = get_device_type(device)
    return kind if kind == "cpu" else f"{kind}:{device.id} {device.device_kind}"


def choose_precision(name: str, device: Any) -> Any:
    """Return the dtype of a precision. `auto` is bf16 on a GPU; on a CPU it would be slower."""
    if name == "auto":
        return jnp.bfloat16 if get_device_type(device) == "cuda" else jnp.float32
    if name not in DTYPES:
        raise UsageError(
            f"training.mixed_precision: {name} is not available with engine=jax; use bf16, which needs no loss scale, or fp32"
        )
    return DTYPES[name]


def configure_computation(device: Any, dtype: Any) -> None:
    """Compute on this device by default, and products of float32 in float32: a GPU would round their factors to ten bits."""
    if device.platform != jax.default_backend():
        jax.config.update("jax_default_device", device)
    if dtype == jnp.float32:
        jax.config.update("jax_default_matmul_precision", "highest")


def make_deterministic() -> None:
    """Make XLA use deterministic kernels on a GPU; it reads the flag when the GPU is first used. A CPU is always deterministic."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "deterministic" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true".strip()


def convert_batch(batch: Batch) -> dict[str, Any]:
    """Return a host batch with the dtypes that a device of JAX has: no 64-bit numbers."""
    narrow = {np.dtype(np.int64): np.int32, np.dtype(np.uint64): np.uint32, np.dtype(np.float64): np.float32}
    converted: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, Mapping):
            converted[name] = convert_batch(value)
            continue
        array = np.asarray(value)
        converted[name] = array.astype(narrow.get(array.dtype, array.dtype), copy=False)
    return converted
