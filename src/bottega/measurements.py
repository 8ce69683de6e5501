"""Plain values that an engine measures: the memory of training by what it holds, and the operations that take most time; bytes as text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

GIB = 1 << 30


class ModelMemory(NamedTuple):
    """Memory of the weights of one model. The fields are keys of `bottega plan --memory --json`."""

    name: str
    parameters: int
    learning: int  # the number of trainable parameters
    bytes: int
    kind: str
    """The dtype of most of its bytes."""


class StepMemory(NamedTuple):
    """Memory and speed of a training step at one micro-batch size. The fields are keys of `bottega plan --memory --json`."""

    micro_batch: int
    peak: int
    """Bytes: on a GPU the peak of the whole step, elsewhere the tensors that autograd saves for backward."""
    reserved: int
    """Bytes that the GPU allocator reserved, fragmentation included; 0 elsewhere."""
    samples_per_second: float


class MemoryReport(NamedTuple):
    """Memory of the weights, gradients and optimizer state, and of one step at each micro-batch size."""

    device: str
    """The device's product name."""
    models: list[ModelMemory]
    """The trained model first."""
    gradient_bytes: int
    optimizer_bytes: int
    steps: list[StepMemory]


class MemoryUse(NamedTuple):
    """Bytes that a training process uses, by what they hold. The fields are keys of memory.json."""

    device: str
    peak: int
    """The sum of the categories except `CACHED`: on a GPU of tensors, elsewhere the resident memory of the process."""
    total: int
    """Memory of the GPU, or of the host within the limits of the process's container."""
    categories: dict[str, int]


CACHED = "cached by the allocator"
"""The category of memory that the GPU allocator holds for later tensors, beyond the peak."""


def format_bytes(size: float) -> str:
    """Return a number of bytes with a binary unit, such as "812 B", "5.5 MiB", "512 MiB" or "23.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB" if size < 10 else f"{size:.1f} GiB"


def format_categories(memory: MemoryUse) -> str:
    """Return the categories with one unit, such as "weights 0.5, optimizer 1.0 GiB"; those that round to 0 are left out."""
    unit, name_of_unit = (GIB, "GiB") if max(memory.categories.values(), default=0) >= GIB else (1 << 20, "MiB")
    sizes = {name: f"{size / unit:.1f}" for name, size in memory.categories.items()}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size != "0.0") + f" {name_of_unit}"


class OperationCost(NamedTuple):
    """Time of one operation over all profiled steps, without the operations that it calls. The fields are keys of operations.json."""

    name: str
    calls: int
    self_ms: float
    share: float
    """Fraction of the time of all operations."""
    device: str
    """cpu, or cuda for a kernel."""


class StepProfile(NamedTuple):
    """The costliest operations of consecutive training steps, and the trace of all of them."""

    steps: tuple[int, int]
    """First and last profiled step, counted from 1."""
    device: str
    wall_ms: float
    """Time from the start of the first step to the end of the last."""
    total_ms: float
    """Time of all operations; on a GPU that of its kernels."""
    operations: list[OperationCost]
    """The costliest first."""
    write_trace: Callable[[Path], None]
    """Writes the trace in the JSON format of Chrome, which Perfetto opens."""


class StepProfiler(ABC):
    """Records the operations of consecutive training steps. A failure is a warning and never ends training."""

    @abstractmethod
    def record(
        self, first: int, last: int, *, write: Callable[[StepProfile], None], warn: Callable[[str], None]
    ) -> None:
        """Record the steps `first` to `last`, counted from 1, as they are trained, and then pass the profile to `write`."""

    @abstractmethod
    def finish(self) -> None:
        """End the recording early, if it has begun and not ended, and pass the profile to `write`."""


class MemoryPrediction(NamedTuple):
    """Predicted memory of training at its peak. The fields are keys of `memory` in `bottega plan --json`."""

    peak: int
    """The sum of the categories."""
    categories: dict[str, int]
    """What holds the memory -> bytes."""


class PredictionUnavailable(Exception):
    """The memory of a model cannot be predicted; the message says why, as a clause."""
