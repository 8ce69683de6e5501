"""Rank and device mesh of this process. Only this module reads the environment variables of torchrun and accelerate.

Processes that differ along the mesh axis `replicate` or `shard` train on different samples; processes along `tensor` work on the
same samples. So the order of samples, the noise and sums of counts depend on `data_rank` of `data_size`; files, messages and
process groups depend on the rank.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
"""Environment variables that a launcher sets for a process group, besides TORCHELASTIC_..."""

MAX_DIGITS = 10
"""Limit on the digits of a rank or size, because int() refuses thousands of digits."""


AXES = ("replicate", "shard", "tensor")
"""Axes of the mesh, outermost first: ranks that differ along the last axis only are neighbours."""


@dataclass(frozen=True)
class World:
    """The processes that train one model, and the rank of this one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Rank among the processes of this machine, which selects the GPU."""
    local_size: int = 1
    """Number of processes on this machine."""
    mesh: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Axis -> number of processes along it; by default all processes are along `replicate`. A missing axis has size 1."""

    def __post_init__(self) -> None:
        mesh = {axis: self.mesh[axis] for axis in AXES if axis in self.mesh} if self.mesh else {AXES[0]: self.size}
        if len(mesh) != len(self.mesh or mesh):
            raise ValueError(f"a mesh has the axes {', '.join(AXES)}, not {', '.join(self.mesh)}")
        if min(mesh.values()) < 1 or math.prod(mesh.values()) != self.size:
            raise ValueError(f"a mesh of {mesh} does not have {self.size} processes")
        object.__setattr__(self, "mesh", mesh)

    @classmethod
    def from_environment(cls, mesh: Mapping[str, int] | None = None) -> World:
        """Return the world that the launcher has set up; one process without a launcher."""
        size = max(1, _read_number("WORLD_SIZE", 1))
        local_size = max(1, _read_number("LOCAL_WORLD_SIZE", size))
        return cls(_read_number("RANK", 0), size, _read_number("LOCAL_RANK", 0), local_size, mesh or {})

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints messages for all."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """Number of parts a global batch is split into: replicate x shard."""
        return self.size // self.mesh.get("tensor", 1)

    @property
    def data_rank(self) -> int:
        """Index of this process's part of a global batch; ranks along `tensor` have the same one."""
        return self.rank // self.mesh.get("tensor", 1)

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The ranks over which sums are taken, in order: one for each part of a global batch, this one among them."""
        tensor = self.mesh.get("tensor", 1)
        return tuple(range(self.rank % tensor, self.size, tensor))


def _read_number(name: str, default: int) -> int:
    """Read a variable as a number; config/launch.py refuses invalid values before any command runs."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < MAX_DIGITS else default


def is_launched() -> bool:
    """Return whether a launcher started this process."""
    return "RANK" in os.environ


def list_missing_variables() -> list[str]:
    """Return the variables that a process needs to join its group and that are not set."""
    return [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]


def read_rank(environment: Mapping[str, str]) -> int | None:
    """Return RANK of an environment as a number; None if it is not set or not a number."""
    text = environment.get("RANK", "")
    return int(text) if text.isdigit() else None


def get_standalone_environment() -> dict[str, str]:
    """Return this environment without launcher variables, for a child process that is not part of the group."""
    return {
        key: value
        for key, value in os.environ.items()
        if key not in LAUNCH_VARIABLES and not key.startswith("TORCHELASTIC")
    }
