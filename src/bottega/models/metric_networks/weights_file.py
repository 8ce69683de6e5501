"""Read the weights of a metric network from one safetensors file, converted from the published weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bottega.core.errors import CheckpointError


def read_weights(path: Path, *, hint: str) -> dict[str, Tensor]:
    """Read a safetensors file; `hint` says how to convert other files, for the error message."""
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path} is not safetensors, and only safetensors is read, because a pickle can run code; {hint}"
        )
    try:
        return load_file(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is damaged or not a safetensors file ({error}); download or convert it again"
        ) from error


def check_weights(path: Path, weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, hint: str) -> None:
    """Raise `CheckpointError` unless names and shapes are as expected; `hint` names the published weights that fit."""
    missing, unexpected = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unexpected:
        name, verb = (missing[0], "lacks") if missing else (unexpected[0], "contains")
        raise CheckpointError(
            f"{path} {verb} {name} ({len(missing)} missing, {len(unexpected)} unexpected tensors); {hint}"
        )
    for name, tensor in expected.items():
        if weights[name].shape != tensor.shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(weights[name].shape)}, expected {list(tensor.shape)}; {hint}"
            )
