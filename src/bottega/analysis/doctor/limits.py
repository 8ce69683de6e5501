"""Check memory, shared memory and the limits of this process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bottega.analysis.doctor.check_result import CheckResult, Problem
from bottega.measurements import format_bytes

SHARED_MEMORY_FOLDER = Path("/dev/shm")
LEAST_MEMORY, LITTLE_MEMORY = 512 << 20, 2 << 30
"""Available memory in which torch and a small model do not fit, and below which larger ones may not."""
SMALL_SHARED_MEMORY = 512 << 20
"""NCCL takes tens of MiB for each pair of GPUs, and the default of containers is 64 MiB."""
LEAST_FILES, FEW_FILES = 64, 512
"""Open files without which training with four loader workers fails, and below which many workers or remote files may."""
FEW_PROCESSES = 256


def check_limits(num_gpus: int) -> CheckResult:
    """Report memory within the container's limit, swap, /dev/shm, and limits of files, processes and address space."""
    memory, limits = read_memory(), read_limits()
    lines = [("memory", _describe_memory(memory))]
    if memory["shared"] is not None:
        lines.append(("shared", f"{format_bytes(memory['shared'])} in /dev/shm"))
    lines += [(label, _describe_limit(limits[name])) for label, name in LIMIT_LABELS if name in limits]
    problems = [*find_memory_problems(memory, num_gpus), *find_limit_problems(limits)]
    values = {"memory": memory, "limits": limits}
    return CheckResult("memory and limits", tuple(lines), values, tuple(problems), tuple(_list_notes(memory, limits)))


LIMIT_LABELS = (("open files", "open_files"), ("processes", "processes"))


def read_memory() -> dict[str, Any]:
    """Return memory in bytes: of the machine, within the container's limit, available, swap, and of /dev/shm."""
    import psutil

    from bottega.engines.host_memory import get_available_memory, get_total_memory

    try:
        shared = shutil.disk_usage(SHARED_MEMORY_FOLDER).total
    except OSError:  # macOS, Windows, some containers
        shared = None
    return {
        "machine": int(psutil.virtual_memory().total),
        "total": get_total_memory(),
        "available": get_available_memory(),
        "swap": int(psutil.swap_memory().total),
        "shared": shared,
        "can_share": _can_create_shared_memory(),
    }


def _can_create_shared_memory() -> bool | None:
    """Return whether loader workers can share batches with the trainer; None where they use a socket instead."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        descriptor = os.memfd_create("bottega-doctor")
    except OSError:
        return False
    try:
        os.ftruncate(descriptor, 1 << 20)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def read_limits() -> dict[str, int | None]:
    """Return the soft limits of this process, None where there is no limit; nothing on Windows."""
    try:
        import resource
    except ImportError:
        return {}
    names = {"open_files": "NOFILE", "processes": "NPROC", "address_space": "AS", "file_size": "FSIZE"}
    limits: dict[str, int | None] = {}
    for name, suffix in names.items():
        number = getattr(resource, f"RLIMIT_{suffix}", None)
        if number is not None:
            soft, _ = resource.getrlimit(number)
            limits[name] = None if soft == resource.RLIM_INFINITY else soft
    return limits


def find_memory_problems(memory: dict[str, Any], num_gpus: int) -> Iterator[Problem]:
    """Yield problems with too little memory or shared memory."""
    available = memory["available"]
    if available < LITTLE_MEMORY:
        yield Problem(
            "memory",
            f"only {format_bytes(available)} of memory are available",
            "end other processes, or raise the memory limit of the container or job",
            stops_training=available < LEAST_MEMORY,
        )
    if memory["can_share"] is False:
        yield Problem(
            "memory", "the system refuses shared memory (memfd_create), which loader workers need", "set data.workers=0"
        )
    shared = memory["shared"]
    if shared is not None and shared < SMALL_SHARED_MEMORY and num_gpus > 1:
        yield Problem(
            "shared memory",
            f"/dev/shm has only {format_bytes(shared)}, and NCCL needs it for training on several GPUs",
            "start the container with more, such as docker run --shm-size=8g",
        )


def find_limit_problems(limits: dict[str, int | None]) -> Iterator[Problem]:
    """Yield problems with the limits of this process."""
    files = limits.get("open_files")
    if files is not None and files < FEW_FILES:
        yield Problem(
            "open files",
            f"this process may open only {files} files, and every loader worker and remote file needs some",
            "raise the limit: ulimit -n 4096",
            stops_training=files < LEAST_FILES,
        )
    processes = limits.get("processes")
    if processes is not None and processes < FEW_PROCESSES:
        yield Problem(
            "processes",
            f"this user may run only {processes} processes and threads, and torch starts one for each core",
            "raise the limit: ulimit -u 4096",
        )


def _list_notes(memory: dict[str, Any], limits: dict[str, int | None]) -> Iterator[str]:
    shared = memory["shared"]
    if shared is not None and shared < SMALL_SHARED_MEMORY:
        yield (
            f"/dev/shm has only {format_bytes(shared)}: loader workers of Bottega do not use it, but NCCL and the DataLoader of a "
            "plugin do; docker run --shm-size=8g gives more"
        )
    if (size := limits.get("file_size")) is not None:
        yield f"files are limited to {format_bytes(size)} (ulimit -f), so larger checkpoints cannot be written"
    if (space := limits.get("address_space")) is not None:
        yield f"the address space is limited to {format_bytes(space)} (ulimit -v); GPUs need far more than their memory"


def _describe_memory(memory: dict[str, Any]) -> str:
    text = f"{format_bytes(memory['total'])}, {format_bytes(memory['available'])} available"
    if memory["total"] < memory["machine"]:
        text += f" (container limit; the machine has {format_bytes(memory['machine'])})"
    return text + (f", swap {format_bytes(memory['swap'])}" if memory["swap"] else ", no swap")


def _describe_limit(value: int | None) -> str:
    return "no limit" if value is None else f"at most {value:,}"
