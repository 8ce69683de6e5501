"""Weights to and from the layout of transformers, by config.json and safetensors alone: no remote code, no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bottega.core.errors import CheckpointError, EnvironmentProblem, UsageError
from bottega.models.json_object import read_object
from bottega.schema.transformer import TransformerShape

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
"""model_type -> class: those our model computes exactly. Qwen2 has biases in its attention, which ours has not."""

PATTERNS = ["*.safetensors", "*.json", "tokenizer.model", "merges.txt", "vocab.txt"]


def export_transformers(
    state: Mapping[str, Tensor],
    shape: TransformerShape,
    folder: Path | str,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> Path:
    """Write config.json and model.safetensors, which AutoModelForCausalLM opens."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in state.items()}
    model_type = "qwen3" if shape.qk_norm else "llama"
    config = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_epsilon,
        # Before version 5 transformers read the first form, since then the second.
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": shape.dropout,
        "use_sliding_window": False,
        "tie_word_embeddings": shape.tie_embeddings,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "torch_dtype": str(tensors["model.norm.weight"].dtype).removeprefix("torch."),
        "use_cache": True,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def read_shape(folder: Path | str) -> TransformerShape:
    """The shape of a local folder's model, refused unless our model computes it exactly."""
    path = Path(folder) / "config.json"
    config = read_object(path)
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        named = (config.get("architectures") or [model_type])[0]
        raise UsageError(
            f"{path}: architecture {named} is not supported; supported: {', '.join(ARCHITECTURES.values())}"
        )
    _check_exact(config, path)
    layers = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    missing = [key for key in (*layers, "vocab_size", "max_position_embeddings") if key not in config]
    if missing:
        raise CheckpointError(f"{path}: the keys {', '.join(missing)} are missing; it is no complete model config")
    heads = config["num_attention_heads"]
    # Where a key was left out, what the class of that model_type takes in its place.
    head_size = config.get("head_dim") or (128 if model_type == "qwen3" else config["hidden_size"] // heads)
    return TransformerShape(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_size=head_size,
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        context=config["max_position_embeddings"],
        dropout=config.get("attention_dropout") or 0.0,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=model_type == "qwen3",
        rope_theta=_rope(config).get("rope_theta") or config.get("rope_theta") or 10000.0,
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
    )


def load_weights(module: nn.Module, folder: Path | str) -> None:
    """Fill a module that has memory from one or several safetensors files; every name and shape must agree."""
    folder = Path(folder)
    state = module.state_dict()
    places = _places(folder)
    if _tied(module):
        # Some writers keep the shared head beside the embedding; it is the same matrix.
        places.pop("lm_head.weight", None)
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


def fetch_folder(name: str, *, key: str = "model.from", is_local: bool = False) -> Path:
    """A local folder as it is; else a hub name, downloaded without anything that could run code.

    `key` is who asks. What reads as a path, or `is_local`, is never asked of the network: it would be told what our folders
    are called, and might have something else under that name.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if is_local or _is_path(name):
        raise UsageError(f"{key}: {name} is no folder here; correct the path, or put the folder there")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError as error:
        raise EnvironmentProblem(
            f"{key}: {name} is no folder here, and the hub needs a package; pip install 'bottega[hub]'"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except HFValidationError as error:
        raise UsageError(f"{key}: {name!r} is neither a folder here nor a hub name such as Qwen/Qwen3-0.6B") from error
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"{key}: {name} is no folder here, and the hub shows no such model; correct it, or log in if it is private"
        ) from error
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise EnvironmentProblem(
            f"{key}: {name} is no folder here, and the hub could not be reached; correct the path, or try again online"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EnvironmentProblem(
            f"{key}: {name} is no folder here, and could not be downloaded ({reason}); try again"
        ) from error


def _is_path(name: str) -> bool:
    """Not owner/model: by how it begins, by more than one slash, or because the folder before the slash is here."""
    begins = name.startswith((".", "/", "~", "runs/"))
    return begins or name.count("/") > 1 or ("/" in name and Path(name).parent.is_dir())


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _check_exact(config: Mapping[str, Any], path: Path) -> None:
    """Refuse what would load without a complaint and compute something else."""
    rope_type = _rope(config).get("rope_type") or _rope(config).get("type") or "default"
    window = config.get("sliding_window")
    slides = config.get("use_sliding_window", config["model_type"] == "mistral") and window is not None
    problems = {
        f"attention_bias {config.get('attention_bias')}": config.get("attention_bias", False),
        f"mlp_bias {config.get('mlp_bias')}": config.get("mlp_bias", False),
        f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act", "silu") not in ("silu", "swish"),
        f"rope_type {rope_type!r}": rope_type != "default",
        f"sliding_window {window}": slides and window < config.get("max_position_embeddings", 0),
    }
    for problem, present in problems.items():
        if present:
            raise UsageError(f"{path}: {problem} is not supported; supported are bias-free SiLU models with plain RoPE")


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
                found = tensors.get_tensor(name)
                if found.shape != state[name].shape:
                    raise CheckpointError(
                        f"{file}: {name} has shape {list(found.shape)}, the recipe's model needs {list(state[name].shape)}"
                    )
                state[name].copy_(found)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: is damaged ({error}); download it again") from error


def _tied(module: nn.Module) -> bool:
    shape = getattr(module, "shape", None)
    return isinstance(shape, TransformerShape) and shape.tie_embeddings
