"""Tensors of a checkpoint in JAX: copies on the host, and checks before they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from bottega.core.engine import Snapshot
from bottega.core.errors import CheckpointError
from bottega.core.types import Tensors

Array = Any


class JaxSnapshot(Snapshot):
    """Copies of the state by file; they arrive on the host while the next steps run."""

    def __init__(self, files: Mapping[str, Mapping[str, Array]]) -> None:
        self._files = files

    def files(self) -> Mapping[str, Tensors]:
        return {
            file: {name: np.asarray(value) for name, value in tensors.items()} for file, tensors in self._files.items()
        }


def take_snapshot(files: Mapping[str, Mapping[str, Array]]) -> JaxSnapshot:
    """Copy the state on the device, whose memory the next step reuses, and start the copy to the host."""
    copies = jax.tree.map(lambda value: value.copy(), {file: dict(tensors) for file, tensors in files.items()})
    for value in jax.tree.leaves(copies):
        value.copy_to_host_async()
    return JaxSnapshot(copies)


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a safetensors file, by name."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    try:
        return load_file(path)
    except Exception as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from None


def check_finite(loaded: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if weights are NaN or infinite."""
    for name, tensor in loaded.items():
        if not np.isfinite(np.asarray(tensor)).all():
            raise CheckpointError(
                f"{path}: {name} contains values that are not finite (NaN or infinity), so this checkpoint cannot be used; "
                "choose an earlier one (--checkpoint; --resume_from to train), or train again with a lower learning rate"
            )
