"""Reads and verifies safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from bottega.core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 1 << 24


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file as torch's, by name."""
    from safetensors.torch import load_file

    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    try:
        return load_file(path)
    except Exception as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from None


def check_tensors(path: Path) -> None:
    """Raise `CheckpointError` if a safetensors file cannot be read to its end, or its header does not describe it."""
    try:
        with safe_open(path, framework="np") as file:  # checks the header against the length of the file
            file.keys()
        with path.open("rb") as stream:
            while stream.read(CHUNK_BYTES):
                pass
    except Exception as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from None
