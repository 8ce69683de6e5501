"""Chooses the device torch computes on."""

from __future__ import annotations

import torch

from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.world import World

DEVICE_TYPES = ("cpu", "cuda", "mps")


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
        raise EnvironmentProblem("device: cuda is not available: torch found no GPU; use device=cpu or device=auto")
    if device_type == "mps" and not torch.backends.mps.is_available():
        raise EnvironmentProblem("device: mps is not available; use device=cpu or device=auto")
    if device_type == "cuda":
        index = World.from_environment().local_rank if ":" not in name else int(name.partition(":")[2])
        if index >= torch.cuda.device_count():
            raise EnvironmentProblem(
                f"device: cuda:{index} does not exist; the last GPU is cuda:{torch.cuda.device_count() - 1}"
            )
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device(name)
