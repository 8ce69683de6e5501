"""The variables that torchrun and accelerate set, checked before anybody counts processes by them."""

from __future__ import annotations

import os

from bottega.core.errors import UsageError
from bottega.world import World

VARIABLE_LIMITS = {
    "WORLD_SIZE": (1, 1 << 20),
    "RANK": (0, 1 << 20),
    "LOCAL_RANK": (0, 1 << 20),
    "LOCAL_WORLD_SIZE": (1, 1 << 20),
    "MASTER_PORT": (0, 65535),
}
"""The smallest and the largest value of each."""


def check_launch_variables() -> None:
    """Raise UsageError where a variable of the launcher is not a number that it can be."""
    for name, (least, most) in VARIABLE_LIMITS.items():
        text = os.environ.get(name)
        if text is not None and not (text.isascii() and text.isdigit() and least <= int(text[:9]) <= most):
            raise UsageError(
                f"the environment variable {name} is {text[:40]!r}; torchrun sets it to a number from {least} to {most}: "
                "unset it, or start the processes with torchrun"
            )
    world = World.from_environment()
    if world.rank >= world.size:
        raise UsageError(
            f"the environment variable RANK is {world.rank}, and WORLD_SIZE {world.size}: ranks are counted from 0; unset both, or "
            "start the processes with torchrun"
        )
