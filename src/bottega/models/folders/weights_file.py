"""Writes the weights of a torch or JAX model as a file of safetensors, without importing the other framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

METADATA = {"format": "pt"}
"""Names and layouts are those of torch, whichever framework trained the model."""


def save_weights(model: Any, path: Path) -> None:
    """Write the weights of a model under the names of its state dict."""
    state = model.state_dict()
    if all(isinstance(value, np.ndarray) for value in state.values()):
        from safetensors.numpy import save_file

        save_file({name: np.ascontiguousarray(value) for name, value in state.items()}, path, metadata=METADATA)
        return
    from safetensors.torch import save_file as save_tensors

    save_tensors({name: tensor.detach().contiguous().cpu() for name, tensor in state.items()}, path, metadata=METADATA)
