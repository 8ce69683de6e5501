"""Tensors on their way to a checkpoint and back: a snapshot that travels while training goes on, and back only where they fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from bottega.core.engine import Snapshot
from bottega.core.errors import CheckpointError
from bottega.core.types import Tensors


class TorchSnapshot(Snapshot):
    def __init__(self, files: dict[str, dict[str, Tensor]], copied: torch.cuda.Event | None) -> None:
        self._files, self._copied = files, copied

    def files(self) -> Mapping[str, Tensors]:
        if self._copied is not None:
            self._copied.synchronize()
        return {file: {name: t.numpy() for name, t in tensors.items()} for file, tensors in self._files.items()}


def take_snapshot(
    state: Mapping[str, Mapping[str, Tensor]], buffers: dict[str, dict[str, Tensor]], *, on_device: bool
) -> TorchSnapshot:
    """A copy of the state in `buffers`, pinned and kept from save to save: it then runs behind the next kernels of the
    same stream."""
    files: dict[str, dict[str, Tensor]] = {}
    for file, tensors in state.items():
        kept = buffers.setdefault(file, {})
        for name, tensor in tensors.items():
            buffer = kept.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_device)
            buffer.copy_(tensor.detach(), non_blocking=True)
        files[file] = {name: kept[name] for name in tensors}
    if not on_device:
        return TorchSnapshot(files, None)
    copied = torch.cuda.Event()
    copied.record()
    return TorchSnapshot(files, copied)


def check_same_layout(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], path: Path) -> None:
    """Names, shapes and types must be equal; nothing is cast or filled in silently."""
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is not in the model" for name in found if name not in wanted]
    for name in wanted.keys() & found.keys():
        a, b = found[name], wanted[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            problems.append(f"{name} is {a.dtype} {tuple(a.shape)}, the model has {b.dtype} {tuple(b.shape)}")
    if problems:
        more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(f"{path} does not fit the model: {'; '.join(sorted(problems)[:10])}{more}")


def check_finite(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], path: Path) -> None:
    """Refuse weights that are NaN or infinite: whatever is computed with them is as well. `wanted` are those of a new
    model, where a mask may hold infinity."""
    for name, tensor in found.items():
        if tensor.is_floating_point() and not is_finite(tensor) and is_finite(wanted[name]):
            raise CheckpointError(
                f"{path}: {name} holds values that are not finite (NaN or infinity), so this checkpoint cannot be used; "
                "give an earlier one (--checkpoint; --resume_from to train on), or train again with a lower learning rate"
            )


def is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach().float()).all())
