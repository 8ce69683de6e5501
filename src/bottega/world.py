"""Which of how many processes this one is. What torchrun and accelerate say of that is read here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
"""The variables by which a launcher makes processes a group; TORCHELASTIC_... come beside them."""

LONGEST = 10
"""Digits of a number that could count processes; Python refuses to read thousands of them."""


@dataclass(frozen=True)
class World:
    """The processes that train one model together, and this one's place among them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Among the processes of this machine; it decides which GPU this one takes."""
    local_size: int = 1
    """Processes on this machine."""

    @classmethod
    def current(cls) -> World:
        """The world that the launcher describes; one process without a launcher."""
        size = max(1, _number("WORLD_SIZE", 1))
        here = max(1, _number("LOCAL_WORLD_SIZE", size))
        return cls(_number("RANK", 0), size, _number("LOCAL_RANK", 0), here)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks to people for all."""
        return self.rank == 0


def _number(name: str, default: int) -> int:
    """A variable as a number. What is none is refused by config/launch.py, which every command asks first."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < LONGEST else default


def is_launched() -> bool:
    """Whether a launcher started this process."""
    return "RANK" in os.environ


def missing_variables() -> list[str]:
    """The variables that a process needs to join its group, and that nobody has set."""
    return [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]


def rank_of(environment: Mapping[str, str]) -> int | None:
    """The rank of a process by its environment; None where it has none."""
    text = environment.get("RANK", "")
    return int(text) if text.isdigit() else None


def environment_alone() -> dict[str, str]:
    """The environment for a process of our own that is not one of the group."""
    return {key: value for key, value in os.environ.items() if key not in GROUP and not key.startswith("TORCHELASTIC")}
