"""Which of how many processes this one is, and which samples it sees. What torchrun and accelerate say of that is read here and
nowhere else.

The processes form a mesh. Those that differ along `replicate` or `shard` see different samples; those along `tensor` share the
work on the same ones. So the order of samples, the positions of noise and the sums of counts follow the data coordinate
(`data_rank` of `data_size`), and files, messages and process groups the rank.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
"""The variables by which a launcher makes processes a group; TORCHELASTIC_... come beside them."""

MAX_DIGITS = 10
"""Digits of a number that could count processes; Python refuses to read thousands of them."""


AXES = ("replicate", "shard", "tensor")
"""The axes of the mesh, the outermost first: ranks that differ along the last one alone are neighbours."""


@dataclass(frozen=True)
class World:
    """The processes that train one model together, and this one's place among them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Among the processes of this machine; it decides which GPU this one takes."""
    local_size: int = 1
    """Processes on this machine."""
    mesh: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Axis -> processes along it; by default all of them replicate. An axis that is left out has one."""

    def __post_init__(self) -> None:
        mesh = {axis: self.mesh[axis] for axis in AXES if axis in self.mesh} if self.mesh else {AXES[0]: self.size}
        if len(mesh) != len(self.mesh or mesh):
            raise ValueError(f"a mesh has the axes {', '.join(AXES)}, not {', '.join(self.mesh)}")
        if min(mesh.values()) < 1 or math.prod(mesh.values()) != self.size:
            raise ValueError(f"a mesh of {mesh} is not one of {self.size} processes")
        object.__setattr__(self, "mesh", mesh)

    @classmethod
    def from_environment(cls, mesh: Mapping[str, int] | None = None) -> World:
        """The world that the launcher describes; one process without a launcher."""
        size = max(1, _number("WORLD_SIZE", 1))
        here = max(1, _number("LOCAL_WORLD_SIZE", size))
        return cls(_number("RANK", 0), size, _number("LOCAL_RANK", 0), here, mesh or {})

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks to people for all."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """How many shares a global batch has: replicate x shard."""
        return self.size // self.mesh.get("tensor", 1)

    @property
    def data_rank(self) -> int:
        """Which of these shares this process sees; ranks along `tensor` see the same one."""
        return self.rank // self.mesh.get("tensor", 1)

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The ranks that have one share each, in their order, this one among them: over them sums are taken."""
        tensor = self.mesh.get("tensor", 1)
        return tuple(range(self.rank % tensor, self.size, tensor))


def _number(name: str, default: int) -> int:
    """A variable as a number. What is none is refused by config/launch.py, which every command asks first."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < MAX_DIGITS else default


def is_launched() -> bool:
    """Whether a launcher started this process."""
    return "RANK" in os.environ


def list_missing_variables() -> list[str]:
    """The variables that a process needs to join its group, and that nobody has set."""
    return [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]


def read_rank(environment: Mapping[str, str]) -> int | None:
    """The rank of a process by its environment; None where it has none."""
    text = environment.get("RANK", "")
    return int(text) if text.isdigit() else None


def get_standalone_environment() -> dict[str, str]:
    """The environment for a process of our own that is not one of the group."""
    return {
        key: value
        for key, value in os.environ.items()
        if key not in LAUNCH_VARIABLES and not key.startswith("TORCHELASTIC")
    }
