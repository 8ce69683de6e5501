"""Chooses the device torch computes on."""

from __future__ import annotations

import torch

from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.world import World

KINDS = ("cpu", "cuda", "mps")


def choose_device(name: str) -> torch.device:
    """Return the device of a recipe's `device`; a GPU that is requested but absent is an error, never a silent CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.partition(":")[0] == "gpu":
        name = name.replace("gpu", "cuda", 1)
    kind = name.partition(":")[0]
    if kind not in KINDS:
        raise UsageError(f"device: {name!r} is not a device; choose from auto, {', '.join(KINDS)}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise EnvironmentProblem("device: cuda is not available: torch found no GPU; use device=cpu or device=auto")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise EnvironmentProblem("device: mps is not available; use device=cpu or device=auto")
    if kind == "cuda":
        index = World.from_environment().local_rank if ":" not in name else int(name.partition(":")[2])
        if index >= torch.cuda.device_count():
            raise EnvironmentProblem(
                f"device: cuda:{index} does not exist; there are only {torch.cuda.device_count()} GPUs"
            )
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device(name)
