"""Time of operations by name, from the events of torch's profiler: each moment counts for one operation only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch.autograd import DeviceType

from bottega.measurements import OperationCost

MAX_KERNELS_PER_CALL = 8
"""Kernels of one call up to which their time is that of the operation; a call with more is a graph that replays a whole model."""

# Before torch 2.13 such an event is given the kernels of an operation too, if their ids are equal by chance.
_DRIVER_EVENT = re.compile(
    r"(cuda|cu|hip)[A-Z]\w*|Activity Buffer Request|Buffer Flush|Command Buffer Full|Driver Compiler|Instrumentation"
    r"|Lazy Function Loading|Resource|Runtime Triggered Module Loading"
)


def rank_operations(events: Iterable[Any], *, count: int) -> tuple[list[OperationCost], float]:
    """Return the `count` costliest operations, and the milliseconds of all.

    If a GPU was used these are times of its kernels, by the operation that launched them (`aten::mm`), or by the name of
    the kernel if no operation did. Otherwise they are times on the CPU. Named regions are not operations.
    """
    operations = [event for event in events if not event.is_user_annotation]
    kernels = [event for event in operations if event.device_type != DeviceType.CPU]
    on_cpu = [event for event in operations if event.device_type == DeviceType.CPU]
    calls, microseconds = _sum_kernel_times(on_cpu, kernels) if kernels else _sum_cpu_times(on_cpu)
    total = sum(microseconds.values())
    costs = [
        OperationCost(
            name=name,
            calls=calls[name],
            self_ms=time / 1000,
            share=time / total if total else 0.0,
            device="cuda" if kernels else "cpu",
        )
        for name, time in microseconds.most_common(count)
    ]
    return costs, total / 1000


def _sum_cpu_times(events: Iterable[Any]) -> tuple[Counter[str], Counter[str]]:
    """Return calls and microseconds by operation, without the time of the operations that an operation calls."""
    calls: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for event in events:
        calls[event.name] += 1
        microseconds[event.name] += event.self_cpu_time_total
    return calls, microseconds


def _sum_kernel_times(events: Iterable[Any], kernels: Iterable[Any]) -> tuple[Counter[str], Counter[str]]:
    """Return calls and microseconds on the GPU by the operation that launched the kernels; by kernel where none did."""
    calls: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for kernel in kernels:
        calls[kernel.name] += 1
        microseconds[kernel.name] += kernel.time_range.elapsed_us()
    for event in events:
        if not 0 < len(event.kernels) <= MAX_KERNELS_PER_CALL or _DRIVER_EVENT.fullmatch(event.name):
            continue
        for kernel in event.kernels:  # moved from the row of the kernel to that of the operation
            calls[kernel.name] -= 1
            microseconds[kernel.name] -= kernel.duration
            microseconds[event.name] += kernel.duration
        calls[event.name] += 1
    return calls, Counter({name: time for name, time in microseconds.items() if calls[name] > 0})
