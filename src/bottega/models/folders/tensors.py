"""Reads and verifies safetensors files."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from bottega.core.errors import CheckpointError


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file, by name."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    try:
        return load_file(path)
    except Exception as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from None


def check_tensors(path: Path) -> None:
    """Raise `CheckpointError` if a tensor of a safetensors file cannot be read.

    Tensors are read one at a time, because a file may be larger than memory.
    """
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is not a dict)
                file.get_tensor(name)
    except Exception as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from None
