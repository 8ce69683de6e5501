"""The weights of a network that measures, out of one safetensors file that a person has made of published ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from bottega.core.errors import CheckpointError


def read_weights(path: Path, *, convert: str) -> dict[str, Tensor]:
    """`convert` says how to make such a file of what is published."""
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: only safetensors is read, because a pickle can run code; {convert}")
    try:
        return load_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: is damaged or no safetensors file ({error})") from error


def check_weights(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, fits: str) -> None:
    """The same names and shapes, or an error; `fits` says which published weights have them."""
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unexpected:
        name, what = (missing[0], "lacks") if missing else (unexpected[0], "holds")
        raise CheckpointError(
            f"{path}: {what} {name} ({len(missing)} missing, {len(unexpected)} unexpected tensors); {fits}"
        )
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(found[name].shape)}, where {list(tensor.shape)} is needed"
            )
