"""Validation of the environment variables that torchrun and accelerate set."""

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
"""Smallest and largest valid value of each variable."""


def check_launch_variables() -> None:
    """Raise UsageError if a variable of the launcher is not a valid number."""
    for name, (minimum, maximum) in VARIABLE_LIMITS.items():
        text = os.environ.get(name)
        if text is not None and not (text.isascii() and text.isdigit() and minimum <= int(text[:9]) <= maximum):
            raise UsageError(
                f"the environment variable {name} is {text[:40]!r}; expected a number from {minimum} to {maximum}: "
                "unset it, or start the processes with torchrun"
            )
    world = World.from_environment()
    if world.rank >= world.size:
        raise UsageError(
            f"the environment variable RANK is {world.rank}, expected less than WORLD_SIZE, which is {world.size}: unset both, or "
            "start the processes with torchrun"
        )
