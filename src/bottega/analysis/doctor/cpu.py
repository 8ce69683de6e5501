"""The CPU and how much of it this process may use: affinity, quota of the container, threads of torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CPU_FILE, CGROUP_FILE, CGROUP_ROOT = Path("/proc/cpuinfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Cpu:
    """The CPU of this machine; `quota` is the number of cores that the container may use at a time, None without a limit."""

    model: str
    num_cores: int
    num_usable: int
    quota: float | None

    @property
    def num_effective(self) -> float:
        """Cores that this process can really use."""
        return min(self.num_usable, self.quota if self.quota is not None else self.num_usable)


def read_cpu() -> Cpu:
    """Return model and cores of the CPU."""
    num_cores = os.cpu_count() or 1
    try:
        num_usable = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        num_usable = num_cores
    return Cpu(_read_model(), num_cores, num_usable, min(_read_quotas(), default=None))


def _read_model() -> str:
    try:
        for line in CPU_FILE.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            pass
    return platform.processor() or platform.machine()


def _read_quotas() -> Iterator[float]:
    """Yield the quota in cores of each cgroup of this process that has one (cgroup v2 and v1).

    engines/host_memory.py walks the same folders for memory; it imports psutil, whose absence `doctor` has to report.
    """
    try:
        lines = CGROUP_FILE.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            root = CGROUP_ROOT if controllers == "" else CGROUP_ROOT / "cpu"
            folder = root / path.strip("/")
            for group in (folder, *folder.parents):
                if not group.is_relative_to(root):
                    break
                if (quota := _read_quota(group)) is not None:
                    yield quota


def _read_quota(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            limit, period = (group / "cpu.max").read_text().split()
        else:
            limit, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if limit in ("max", "-1") else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
