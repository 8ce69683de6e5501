"""Chooses the device torch computes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bottega.core.errors import MissingDevice, UsageError
from bottega.world import World

DEVICE_TYPES = ("cpu", "cuda", "mps")
_simulated_type: str | None = None


def choose_device(name: str) -> torch.device:
    """Return the device that a recipe's `device` names; raise an error, rather than use the CPU, if that GPU is absent."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.partition(":")[0] == "gpu":
        name = name.replace("gpu", "cuda", 1)
    device_type = name.partition(":")[0]
    if device_type not in DEVICE_TYPES:
        raise UsageError(f"device: {name!r} is not a device; choose from auto, {', '.join(DEVICE_TYPES)}")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise MissingDevice("device: cuda is not available: torch found no GPU; use device=cpu or device=auto")
    if device_type == "mps" and not torch.backends.mps.is_available():
        raise MissingDevice("device: mps is not available; use device=cpu or device=auto")
    if device_type == "cuda":
        index = World.from_environment().local_rank if ":" not in name else int(name.partition(":")[2])
        if index >= torch.cuda.device_count():
            raise MissingDevice(
                f"device: cuda:{index} does not exist; the last GPU is cuda:{torch.cuda.device_count() - 1}"
            )
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device(name)


def uses_bfloat16(device: torch.device | str, precision: str) -> bool:
    """Return whether samples are computed in bfloat16: on a CUDA device, unless the recipe asks for another `precision`."""
    return torch.device(device).type == "cuda" and precision in ("auto", "bf16") and torch.cuda.is_bf16_supported()


def get_device_type(device: torch.device) -> str:
    """Return the type of a device; in a simulated step, the type of the device that it stands for.

    For code that chooses between implementations which differ in memory.
    """
    return _simulated_type or device.type


def is_simulated() -> bool:
    """Return whether a step is simulated: tensors have shapes, but no data, and no kernel may be called on them."""
    return _simulated_type is not None


@contextmanager
def simulated_device(device_type: str) -> Iterator[None]:
    """Let tensors on the CPU stand for those of another type of device in this block."""
    global _simulated_type
    previous, _simulated_type = _simulated_type, device_type
    try:
        yield
    finally:
        _simulated_type = previous
