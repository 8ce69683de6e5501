"""Names of devices, precision, determinism, dropout seeds, and the transfer of a batch to the device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from bottega.core.errors import UsageError
from bottega.core.types import Batch
from bottega.models.device import get_device_type


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a precision. `auto` is bf16 on GPUs that support it; on a CPU it would be 2-3 times slower."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    if dtype is torch.float16 and get_device_type(device) == "cpu":
        raise UsageError("training.mixed_precision: fp16 needs a GPU; use bf16 or fp32 on a CPU")
    if device.type == "cuda" and dtype is not torch.float32:
        torch.set_float32_matmul_precision("high")
    return dtype


def describe_device(device: torch.device) -> str:
    """Return the device, for a GPU with its product name, such as "cuda:0 NVIDIA H200"."""
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def make_deterministic() -> None:
    """Make torch use deterministic algorithms only."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # The compiler may choose kernels by timing, and different kernels sum in different orders.
    import torch._inductor.config as compiler

    if hasattr(compiler, "deterministic"):  # since torch 2.10
        compiler.deterministic = True


def seed_dropout(seed: int, device: torch.device) -> None:
    """Seed torch's default generator of the device."""
    # torch.manual_seed would seed every device and cost ten times as much.
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def move_batch(batch: Batch, device: torch.device, *, pin: bool = True) -> dict[str, Any]:
    """Copy a host batch to the device; from pinned memory the copy is asynchronous."""
    device_batch: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, Mapping):
            device_batch[name] = move_batch(value, device, pin=pin)
            continue
        tensor = torch.from_numpy(value if value.flags.writeable else value.copy())
        if device.type != "cpu":
            is_pinned = pin and device.type == "cuda"
            tensor = tensor.pin_memory().to(device, non_blocking=True) if is_pinned else tensor.to(device)
        device_batch[name] = tensor
    return device_batch
