"""Weights to and from the layout of transformers, by config.json and safetensors alone: no remote code, no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bottega.core.errors import CheckpointError, EnvironmentProblem, UsageError, first_line
from bottega.models.decoder.config import TransformerShape
from bottega.models.decoder.layout import OWN, ROUTER_STATE, config_for, layout_for, named, shape_from
from bottega.models.folders.hub_access import hub_if_it_answers
from bottega.models.folders.json_object import read_object

CONFIG = "config.json"
PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


def export_transformers(
    state: Mapping[str, Tensor],
    shape: TransformerShape,
    folder: Path | str,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> Path:
    """Write config.json and model.safetensors, which AutoModelForCausalLM opens unless the layout is our own."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    model_type = layout_for(shape, state)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in named(state, model_type).items()}
    dtype = str(state["model.norm.weight"].dtype).removeprefix("torch.")
    config = config_for(shape, model_type) | {
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "torch_dtype": dtype,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def read_shape(folder: Path | str) -> TransformerShape:
    """The shape of a local folder's model, refused unless our model computes it exactly."""
    path = Path(folder) / CONFIG
    return shape_from(read_object(path), path)


def load_weights(module: nn.Module, folder: Path | str) -> None:
    """Fill a module that has memory from one or several safetensors files; every name and shape must agree."""
    folder = Path(folder)
    state = module.state_dict()
    places = _places(folder)
    shape = getattr(module, "shape", None)
    if isinstance(shape, TransformerShape):
        state = _wanted(state, folder, places)
        if shape.tie_embeddings:
            # Some writers keep the shared head beside the embedding; it is the same matrix.
            places.pop("lm_head.weight", None)
    # Which experts sit out is of a step: there only where some do, and drawn anew.
    state = {name: tensor for name, tensor in state.items() if not name.endswith("router.absent")}
    places = {name: file for name, file in places.items() if not name.endswith("router.absent")}
    missing, unexpected = sorted(state.keys() - places.keys()), sorted(places.keys() - state.keys())
    if missing or unexpected:
        name, what = (missing[0], "lacks") if missing else (unexpected[0], "holds")
        raise CheckpointError(
            f"{folder}: {what} {name} ({len(missing)} missing, {len(unexpected)} unexpected tensors); "
            "is the model of the recipe the model of this folder? read_shape tells its dimensions"
        )
    with torch.no_grad():
        for file in sorted(set(places.values())):
            _fill(state, file, [name for name in state if places[name] == file])


def fetch_weights(module: nn.Module, name: str) -> None:
    """Fill a module from a local folder or a hub name."""
    load_weights(module, fetch_folder(name))


def fetch_folder(
    name: str, *, key: str = "model.from", is_local: bool = False, patterns: Sequence[str] = PATTERNS
) -> Path:
    """A local folder as it is; else a hub name, downloaded without anything that could run code.

    `key` is who asks, `patterns` which files. What reads as a path, or `is_local`, is never asked of the network: it would
    be told what our folders are called, and might have something else under that name.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if is_local or is_path(name):
        raise UsageError(f"{key}: {name} is not a folder here; correct the path, or put the folder there")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError as error:
        raise EnvironmentProblem(
            f"{key}: {name} is not a folder here, and the hub needs a package; pip install 'bottega[hub]'"
        ) from error
    try:
        with hub_if_it_answers() as silence:
            return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except HFValidationError as error:
        raise UsageError(f"{key}: {name!r} is neither a folder here nor a hub name such as Qwen/Qwen3-0.6B") from error
    except GatedRepoError as error:  # a kind of the next one
        raise UsageError(
            f"{key}: {name} is given only to those who agree to its terms; do so on its page on the hub and log in, or "
            "name a folder that has it"
        ) from error
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"{key}: {name} is not a folder here, and the hub shows no such model; correct it, or log in if it is private"
        ) from error
    except (LocalEntryNotFoundError, ConnectionError) as error:
        why = silence or "the hub could not be reached"
        raise EnvironmentProblem(
            f"{key}: {name} is not a folder here, and {why}; correct the path, or check the network and try again"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = first_line(error)
        raise EnvironmentProblem(
            f"{key}: {name} is not a folder here, and could not be downloaded ({reason}); try again"
        ) from error


def is_path(name: str) -> bool:
    """Whether a name is a path and not owner/model: by how it begins, by more than one slash, or because the folder before the slash is here."""
    begins = name.startswith((".", "/", "~", "runs/"))
    return begins or name.count("/") > 1 or ("/" in name and Path(name).parent.is_dir())


def _wanted(state: Mapping[str, Tensor], folder: Path, places: Mapping[str, Path]) -> dict[str, Tensor]:
    """A decoder's tensors by the names that the folder has for them. What routers know besides may be missing, and is then
    as it was built."""
    config = folder / CONFIG
    views = named(state, str(read_object(config).get("model_type")) if config.is_file() else OWN)
    return {name: view for name, view in views.items() if name in places or not ROUTER_STATE.fullmatch(name)}


def _places(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        entries = read_object(index).get("weight_map", {})
        for file in entries.values():
            if Path(file).name != file or not (folder / file).is_file():
                raise CheckpointError(f"{index}: names {file}, which is not in the folder; download it again")
        return {name: folder / file for name, file in entries.items()}
    file = folder / "model.safetensors"
    if file.is_file():
        try:
            with safe_open(file, framework="pt") as tensors:
                return dict.fromkeys(tensors.keys(), file)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: is damaged ({error}); download it again") from error
    pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt*"))
    if pickles:
        raise CheckpointError(
            f"{folder}: {pickles[0]} is a pickle, which can run code and is never opened; "
            "convert it with transformers: model.save_pretrained(folder, safe_serialization=True)"
        )
    raise CheckpointError(f"{folder}: no model.safetensors and no model.safetensors.index.json in it")


def _fill(state: Mapping[str, Tensor], file: Path, names: list[str]) -> None:
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in names:
                shape = tensors.get_slice(name).get_shape()
                if shape != list(state[name].shape):
                    raise CheckpointError(
                        f"{file}: {name} has shape {shape}, the recipe's model needs {list(state[name].shape)}"
                    )
                if not state[name].is_meta:
                    state[name].copy_(tensors.get_tensor(name))
    except SafetensorError as error:
        raise CheckpointError(f"{file}: is damaged ({error}); download it again") from error
