"""Host memory of this process, and what is available to it: free memory within the limits of its container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUP_ROOT, PROCESS_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
PROCESS_STATUS = Path("/proc/self/status")


def get_available_memory() -> int:
    """Return the bytes that can be allocated before the kernel kills a process or refuses."""
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    return max(0, min([free, *(left for _, left in _read_cgroups()), *_read_bytes_left_in_address_space()]))


def get_total_memory() -> int:
    """Return the bytes of the host's memory, or the smallest limit of this process's container."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _read_cgroups())])


def get_resident_memory() -> int:
    """Return the resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def get_peak_resident_memory() -> int:
    """Return the largest resident memory that this process has had, in bytes."""
    try:
        lines = PROCESS_STATUS.read_text().splitlines()
        # Not getrusage, which after fork and exec reports the parent's memory if that was larger.
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, ValueError, StopIteration):
        return get_resident_memory()


def _read_bytes_left_in_address_space() -> Iterator[int]:
    """Yield the bytes left under `ulimit -v`, if there is such a limit."""
    try:
        import resource
    except ImportError:  # Windows
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield limit - psutil.Process().memory_info().vms


def _read_cgroups() -> Iterator[tuple[int, int]]:
    """Yield the limit and the bytes left of each cgroup of this process, innermost first (cgroup v2 and v1)."""
    try:
        lines = PROCESS_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names, root = ("memory.max", "memory.current"), CGROUP_ROOT
        elif "memory" in controllers.split(","):
            names, root = ("memory.limit_in_bytes", "memory.usage_in_bytes"), CGROUP_ROOT / "memory"
        else:
            continue
        folder = root / path.strip("/")
        for group in (folder, *folder.parents):
            if not group.is_relative_to(root):
                break
            if (limit_and_left := _read_cgroup(group, *names)) is not None:
                yield limit_and_left


def _read_cgroup(group: Path, limit_file: str, usage_file: str) -> tuple[int, int] | None:
    """Return the limit of a cgroup and the bytes left in it; None if it has no limit or cannot be read."""
    try:
        maximum, used = (group / limit_file).read_text().strip(), int((group / usage_file).read_text())
        if maximum == "max" or int(maximum) >= 1 << 60:  # no limit, in cgroup v2 and v1
            return None
        rows = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        statistics = {row[0]: int(row[1]) for row in rows if len(row) == 2}
    except (OSError, ValueError):
        return None
    prefix = "total_" if "total_inactive_file" in statistics else ""
    cached = sum(statistics.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file"))
    return int(maximum), int(maximum) - max(0, used - cached)
