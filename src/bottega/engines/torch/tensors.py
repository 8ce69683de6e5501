"""Tensors of a checkpoint: an asynchronous copy to the host, and checks before they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bottega.core.engine import Snapshot
from bottega.core.errors import CheckpointError
from bottega.core.types import Tensors
from bottega.engines.checkpoint_layout import check_same_layout
from bottega.models.folders.tensors import read_tensors


class TorchSnapshot(Snapshot):
    """Host copies of the state by file; `copy_end` is the CUDA event that ends the copy."""

    def __init__(self, files: dict[str, dict[str, Tensor]], copy_end: torch.cuda.Event | None) -> None:
        self._files, self._copy_end = files, copy_end

    def files(self) -> Mapping[str, Tensors]:
        if self._copy_end is not None:
            self._copy_end.synchronize()
        return {file: {name: t.numpy() for name, t in tensors.items()} for file, tensors in self._files.items()}


def take_snapshot(
    state: Mapping[str, Mapping[str, Tensor]], buffers: dict[str, dict[str, Tensor]], *, is_cuda: bool
) -> TorchSnapshot:
    """Copy the state to `buffers`, which are pinned and reused, so that the copy runs asynchronously on the stream."""
    files: dict[str, dict[str, Tensor]] = {}
    for file, tensors in state.items():
        file_buffers = buffers.setdefault(file, {})
        for name, tensor in tensors.items():
            buffer = file_buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = file_buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda)
            buffer.copy_(tensor.detach(), non_blocking=True)
        files[file] = {name: file_buffers[name] for name in tensors}
    if not is_cuda:
        return TorchSnapshot(files, None)
    copy_end = torch.cuda.Event()
    copy_end.record()
    return TorchSnapshot(files, copy_end)


def load_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Load a file into `tensors`, which must have the same names, shapes and dtypes; without tensors there is no file."""
    if tensors:
        loaded = read_tensors(path)
        check_same_layout(loaded, tensors, path)
        for name, tensor in loaded.items():
            tensors[name].copy_(tensor)


def load_model(
    model: torch.nn.Module,
    files: Mapping[str, Mapping[str, Tensor]],
    folder: Path,
    *,
    is_trainable: Callable[[str], bool],
) -> None:
    """Load the weights of the checkpoint `folder`, by file, after checking them; averaged weights replace the trained ones."""
    expected = {
        "model.safetensors": {n: t for n, t in model.state_dict().items() if is_trainable(n)},
        "ema.safetensors": {n: p for n, p in model.named_parameters() if p.requires_grad},
    }
    for file, tensors in files.items():
        check_same_layout(tensors, expected[file], folder / file)
        check_finite(tensors, expected[file], folder / file)
        model.load_state_dict(tensors, strict=False)  # the frozen rest keeps the values it was built with


def check_finite(loaded: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """Raise CheckpointError if weights are NaN or infinite, unless the same tensor of a newly built model is (a mask may be)."""
    for name, tensor in loaded.items():
        if tensor.is_floating_point() and not is_finite(tensor) and is_finite(expected[name]):
            raise CheckpointError(
                f"{path}: {name} contains values that are not finite (NaN or infinity), so this checkpoint cannot be used; "
                "choose an earlier one (--checkpoint; --resume_from to train), or train again with a lower learning rate"
            )


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite."""
    return bool(torch.isfinite(tensor.detach().float()).all())
