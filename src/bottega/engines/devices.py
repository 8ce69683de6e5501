"""Devices, ranks and the way of a batch from the host to where it is used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.core.types import Batch
from bottega.world import World

KINDS = ("cpu", "cuda", "mps")


def choose_device(name: str) -> torch.device:
    """Never a silent CPU: a GPU that was asked for and is absent is an error."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.partition(":")[0] == "gpu":
        name = name.replace("gpu", "cuda", 1)
    kind = name.partition(":")[0]
    if kind not in KINDS:
        raise UsageError(f"device: {name!r} is not a device; use one of auto, {', '.join(KINDS)}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise EnvironmentProblem("device: cuda was asked for, and torch sees no GPU; use device=cpu or device=auto")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise EnvironmentProblem("device: mps was asked for, and it is not available; use device=cpu or device=auto")
    if kind == "cuda":
        index = World.current().local_rank if ":" not in name else int(name.partition(":")[2])
        if index >= torch.cuda.device_count():
            raise EnvironmentProblem(
                f"device: cuda:{index} was asked for, and there are {torch.cuda.device_count()} GPUs"
            )
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device(name)


def count_gpus() -> int:
    """Return the number of GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def limit_threads(count: int | None) -> None:
    """Compute on so many threads of the CPU; None leaves it to torch and to OMP_NUM_THREADS."""
    if count is not None:
        torch.set_num_threads(count)


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """bf16 where the device has it; on a CPU without bf16 units it would be two to three times slower than fp32."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    chosen = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    if chosen is torch.float16 and device.type == "cpu":
        raise UsageError("training.mixed_precision: fp16 needs a GPU; use bf16 or fp32 on a CPU")
    if device.type == "cuda" and chosen is not torch.float32:
        torch.set_float32_matmul_precision("high")
    return chosen


def make_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # The compiler may choose among kernels by the clock, and another choice adds up in another order.
    import torch._inductor.config as compiler

    if hasattr(compiler, "deterministic"):  # since torch 2.10
        compiler.deterministic = True


def seed_dropout(seed: int, device: torch.device) -> None:
    # torch.manual_seed would seed every device and cost ten times as much.
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def put(batch: Batch, device: torch.device, *, pin: bool = True) -> dict[str, Any]:
    """A host batch on the device; from pinned memory the copy does not wait."""
    moved: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, Mapping):
            moved[name] = put(value, device, pin=pin)
            continue
        tensor = torch.from_numpy(value if value.flags.writeable else value.copy())
        if device.type != "cpu":
            pinned = pin and device.type == "cuda"
            tensor = tensor.pin_memory().to(device, non_blocking=True) if pinned else tensor.to(device)
        moved[name] = tensor
    return moved


def batch_length(batch: Batch) -> int:
    """Examples in a batch. A single number, such as a sample rate, is of the whole batch."""
    return next(batch_length(v) if isinstance(v, Mapping) else len(v) for v in batch.values() if _is_sliced(v))


def slice_batch(batch: Batch, start: int, stop: int) -> dict[str, Any]:
    def cut(value: Any) -> Any:
        if isinstance(value, Mapping):
            return slice_batch(value, start, stop)
        return value[start:stop] if _is_sliced(value) else value

    return {name: cut(value) for name, value in batch.items()}


def _is_sliced(value: Any) -> bool:
    return isinstance(value, Mapping) or value.ndim > 0
