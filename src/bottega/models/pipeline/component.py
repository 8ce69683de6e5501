"""Reads and writes one component of a diffusers pipeline (config.json and safetensors), without importing diffusers.

Tensors are those of torch or arrays of numpy; only the former import torch.

diffusers is optional, and its import takes 3 to 4 s, more than reading a VAE of 335 MB (0.8 s). Its `save_pretrained` would
also write the installed version, so that the same weights would give different files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from bottega.core.errors import CheckpointError
from bottega.core.types import Array
from bottega.models.folders.json_object import read_json_object

CONFIG = "config.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
VERSION = "0.36.0"
"""The oldest diffusers that is tested: the library warns about files written by a newer version than itself."""
OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
"""Names of attention layers until 2023, which many published files still have, and their names today."""


def write_component(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
    """Write a component; `config` has diffusers' class as `_class_name`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"_class_name": config["_class_name"], "_diffusers_version": VERSION, **config}
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
    write_safetensors(folder / WEIGHTS, tensors)


def write_safetensors(file: Path, tensors: Mapping[str, Array]) -> None:
    """Write tensors of torch, or arrays of numpy, to a safetensors file."""
    metadata = {"format": "pt"}
    if all(isinstance(tensor, np.ndarray) for tensor in tensors.values()):
        from safetensors.numpy import save_file as save_arrays

        save_arrays({name: np.ascontiguousarray(array) for name, array in tensors.items()}, file, metadata=metadata)
        return
    from safetensors.torch import save_file

    save_file(to_cpu(tensors), file, metadata=metadata)


def to_cpu(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return contiguous copies of tensors of torch on the CPU, as safetensors requires."""
    return {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}


def read_class_name(folder: Path) -> str | None:
    """Return the diffusers class that a folder's config.json names; None without config.json or class."""
    return read_config(folder).get("_class_name") if (folder / CONFIG).is_file() else None


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder."""
    return read_json_object(folder / CONFIG)


def read_component(folder: Path, *, framework: str = "torch") -> dict[str, Array]:
    """Return all tensors of a component, under the names that diffusers uses today; in JAX as arrays of numpy."""
    # By exact file name, because fp16 and non-EMA copies often lie beside the weights.
    files = [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else sorted(folder.glob(_SHARDS))
    if not files:
        pickles = sorted(path.name for ending in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"*.{ending}"))
        if pickles:
            raise CheckpointError(
                f"{folder}: {pickles[0]} is a pickle, which can run code and is never opened; "
                "convert it with diffusers: model.save_pretrained(folder, safe_serialization=True)"
            )
        raise CheckpointError(f"{folder} has no {WEIGHTS}; give the folder of a saved model")
    return {
        _to_current_name(name): tensor
        for file in files
        for name, tensor in read_safetensors(file, framework=framework).items()
    }


def read_safetensors(file: Path, *, framework: str = "torch") -> dict[str, Array]:
    """Return all tensors of a safetensors file, as tensors of torch or, for JAX, as arrays of numpy in float32."""
    try:
        return _load_torch(file) if framework == "torch" else _load_numpy(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged ({error}); write or download it again") from error


def _load_torch(file: Path) -> dict[str, Array]:
    from safetensors.torch import load_file

    return load_file(file)


def _load_numpy(file: Path) -> dict[str, Array]:
    # Through JAX, because numpy has no bfloat16.
    from safetensors.flax import load_file

    return {name: np.asarray(tensor, np.float32) for name, tensor in load_file(file).items()}


_SHARDS = WEIGHTS.replace(".safetensors", "-?????-of-?????.safetensors")


def _to_current_name(name: str) -> str:
    owner, _, kind = name.rpartition(".")
    owner, _, last = owner.rpartition(".")
    return f"{owner}.{OLD_NAMES[last]}.{kind}" if "attentions." in owner and last in OLD_NAMES else name
