"""The out-of-memory error of any engine: what memory was in use by category, and what to do."""

from __future__ import annotations

from bottega.core.errors import OutOfMemory
from bottega.measurements import GIB, MemoryUse, format_categories


def build_out_of_memory_error(memory: MemoryUse, activity: str = "", *, advice: str) -> OutOfMemory:
    """Return the error for an allocation that failed during `activity`, such as "with a micro-batch of 8"."""
    device = f"{memory.device} ({memory.total / GIB:.1f} GiB)"
    place = f"{device} {activity}" if activity else device
    error = OutOfMemory(f"out of memory on {place}: {format_categories(memory)}; {advice}")
    error.memory = memory
    return error
