"""Reads and writes decoder weights in the layout of transformers: config.json and safetensors, no remote code, no pickle.

transformers' own loader is not used: it takes 2.5 s to import, is optional here, and would build a second model whose
tensors are then copied into ours. Tensors are those of torch or arrays of numpy, so that JAX needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open

from bottega.core.errors import CheckpointError
from bottega.core.types import Array
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.layout import (
    OWN_MODEL_TYPE,
    ROUTER_STATE,
    build_config,
    rename_tensors,
    select_layout,
    shape_from_config,
)
from bottega.models.folders.json_object import read_json_object
from bottega.models.folders.resolve import CONFIG, resolve_model

if TYPE_CHECKING:
    from torch import nn


def export_transformers(
    state: Mapping[str, Array],
    shape: TransformerShape,
    folder: Path | str,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> Path:
    """Write config.json and model.safetensors; AutoModelForCausalLM can load them unless the layout is our own."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model_type = select_layout(shape, state)
    dtype = str(state["model.norm.weight"].dtype).removeprefix("torch.")
    config = build_config(shape, model_type) | {
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "torch_dtype": dtype,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    _save_tensors(rename_tensors(state, model_type), folder / "model.safetensors")
    return folder


def _save_tensors(tensors: Mapping[str, Array], path: Path) -> None:
    metadata = {"format": "pt"}
    if all(isinstance(tensor, np.ndarray) for tensor in tensors.values()):
        from safetensors.numpy import save_file as save_arrays

        save_arrays({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path, metadata=metadata)
    else:
        from safetensors.torch import save_file

        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, path, metadata)


def read_decoder_shape(folder: Path | str) -> TransformerShape:
    """Return the shape of a local folder's decoder; raise `UsageError` if our model cannot compute the same as
    transformers."""
    path = Path(folder) / CONFIG
    return shape_from_config(read_json_object(path), path)


def load_weights(module: nn.Module, folder: Path | str) -> None:
    """Fill a module's tensors from one or several safetensors files; every name and shape must match."""
    import torch

    with torch.no_grad():
        fill_tensors(module.state_dict(), folder, shape=getattr(module, "shape", None))


def fill_tensors(state: Mapping[str, Array], folder: Path | str, *, shape: object = None) -> None:
    """Fill tensors in place from the safetensors files of a folder; every name and shape must match.

    `shape` is that of a decoder, whose folder may have the layout of a class of transformers.
    """
    folder = Path(folder)
    files = _find_tensor_files(folder)
    if isinstance(shape, TransformerShape):
        state = _rename_for_folder(state, folder, files)
        if shape.tie_embeddings:
            # Some writers also save the tied head, which is the same matrix as the embedding.
            files.pop("lm_head.weight", None)
    # Which experts are dropped depends on the step and is drawn anew.
    state = {name: tensor for name, tensor in state.items() if not name.endswith("router.absent")}
    files = {name: file for name, file in files.items() if not name.endswith("router.absent")}
    missing, unexpected = sorted(state.keys() - files.keys()), sorted(files.keys() - state.keys())
    if missing or unexpected:
        name, verb = (missing[0], "lacks") if missing else (unexpected[0], "contains")
        raise CheckpointError(
            f"{folder} {verb} {name} ({len(missing)} missing, {len(unexpected)} unexpected tensors); "
            f"set the model's sizes as in {folder / 'config.json'}, or give another folder"
        )
    for file in sorted(set(files.values())):
        _copy_tensors(state, file, [name for name in state if files[name] == file])


def fetch_weights(module: nn.Module, name: str) -> None:
    """Fill a module from a run, a local folder or a hub name."""
    load_weights(module, resolve_model(name, key="model.from").path)


def _rename_for_folder(state: Mapping[str, Array], folder: Path, files: Mapping[str, Path]) -> dict[str, Array]:
    """Return a decoder's tensors under the folder's names. Router buffers may be missing and then keep their values."""
    config = folder / CONFIG
    views = rename_tensors(
        state, str(read_json_object(config).get("model_type")) if config.is_file() else OWN_MODEL_TYPE
    )
    return {name: view for name, view in views.items() if name in files or not ROUTER_STATE.fullmatch(name)}


def _find_tensor_files(folder: Path) -> dict[str, Path]:
    """Map each tensor name to the file that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        entries = read_json_object(index).get("weight_map", {})
        for file in entries.values():
            if Path(file).name != file or not (folder / file).is_file():
                raise CheckpointError(f"{index} lists {file}, which is not in the folder; download it again")
        return {name: folder / file for name, file in entries.items()}
    file = folder / "model.safetensors"
    if file.is_file():
        try:
            with safe_open(file, framework="np") as tensors:  # the names need no framework
                return dict.fromkeys(tensors.keys(), file)
        except SafetensorError as error:
            raise CheckpointError(f"{file} is damaged ({error}); download it again") from error
    pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
    if pickles:
        raise CheckpointError(
            f"{folder}: {pickles[0]} is a pickle, which can run code and is never opened; "
            "convert it with transformers: model.save_pretrained(folder, safe_serialization=True)"
        )
    raise CheckpointError(
        f"{folder} has neither model.safetensors nor model.safetensors.index.json; give the folder of a saved model"
    )


def _copy_tensors(state: Mapping[str, Array], file: Path, names: list[str]) -> None:
    """Copy the named tensors of a file into `state`; on the meta device only shapes are checked."""
    is_numpy = all(isinstance(tensor, np.ndarray) for tensor in state.values())
    try:
        with safe_open(file, framework="np" if is_numpy else "pt") as tensors:
            for name in names:
                shape = tensors.get_slice(name).get_shape()
                if shape != list(state[name].shape):
                    raise CheckpointError(
                        f"{file}: {name} has shape {shape}, but the recipe's model needs {list(state[name].shape)}; "
                        f"set the model's sizes as in {file.parent / 'config.json'}, or give another folder"
                    )
                if is_numpy:
                    state[name][...] = tensors.get_tensor(name)
                elif not state[name].is_meta:
                    state[name].copy_(tensors.get_tensor(name))
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged ({error}); download it again") from error
