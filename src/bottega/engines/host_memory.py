"""Host memory available to this process: free memory within the limits of its container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUP_ROOT, PROCESS_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def get_available_memory() -> int:
    """Return the bytes that can be allocated before the kernel kills a process or refuses."""
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    return max(0, min([free, *_read_bytes_left_in_cgroups(), *_read_bytes_left_in_address_space()]))


def _read_bytes_left_in_address_space() -> Iterator[int]:
    """Yield the bytes left under `ulimit -v`, if there is such a limit."""
    try:
        import resource
    except ImportError:  # Windows
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield limit - psutil.Process().memory_info().vms


def _read_bytes_left_in_cgroups() -> Iterator[int]:
    """Yield the bytes left in each cgroup of this process, innermost first (cgroup v2 and v1)."""
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
            if (bytes_left := _read_bytes_left_in_cgroup(group, *names)) is not None:
                yield bytes_left


def _read_bytes_left_in_cgroup(group: Path, limit_file: str, usage_file: str) -> int | None:
    """Return the bytes left in a cgroup; None if it has no limit or cannot be read."""
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
    return int(maximum) - max(0, used - cached)
