"""Adapter folders in peft's layout: ours can be loaded by peft, and those of peft by us.

`adapter_config.json` and `adapter_model.safetensors` are peft's. `bottega.json` is ours and ignored by peft: the `kind` of
adapter, the hash of the `base` model and of each of its `tensors`, and where the base model came `from`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bottega.core.errors import CheckpointError, UsageError
from bottega.models.folders.json_object import read_json_object
from bottega.models.text_classifier.pretrained import PretrainedClassifier
from bottega.techniques.injected_layers import InjectedTask, list_name_suffixes
from bottega.techniques.tensor_hashes import combine_hashes

if TYPE_CHECKING:
    from bottega.techniques.lora.torch import Lora

CONFIG, WEIGHTS, METADATA_FILE = "adapter_config.json", "adapter_model.safetensors", "bottega.json"
PREFIX = "base_model.model."
FORMAT, VERSION = "bottega-adapter", 1
START = "techniques.lora.start"
SUPPORTED_KEYS = (
    *("peft_type", "r", "lora_alpha"),  # compared
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout",),  # used only in training, for which the recipe's value counts
    # The names of the tensors tell which layers are adapted.
    *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern"),
)
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal"),  # other values, such as pissa, change the base model as well
    "megatron_core": ("megatron.core",),
    "qalora_group_size": (16,),
}
"""peft's defaults, and values that change nothing once the tensors are loaded. All other keys must be null, empty or false:
they would load without an error and compute something else, and peft adds keys faster than a list here could follow."""


def write_adapter(model: nn.Module, folder: Path, lora: Lora, *, origin: str | None) -> None:
    """Write the LoRA layers of a model, and the modules trained in full beside them, as a peft adapter."""
    from bottega.techniques.lora.torch import PARAMETER_NAMES, find_low_rank_layers

    folder.mkdir(parents=True, exist_ok=True)
    tensors, saved_modules = dict[str, Tensor](), list[str]()
    for name, parameter in model.named_parameters():
        if not lora.is_trainable(name):
            continue
        owner, _, kind = to_exported_name(model, name).rpartition(".")
        if kind in PARAMETER_NAMES:
            tensors[f"{PREFIX}{owner}.{kind}.weight"] = parameter
        else:
            tensors[f"{PREFIX}{owner}.{kind}"] = parameter
            saved_modules.append(_find_saved_module(model, owner))
    layers = [_to_exported_layer(model, name) for name in find_low_rank_layers(model)]
    config = {
        "peft_type": "LORA",
        "task_type": _choose_task_type(model),
        "base_model_name_or_path": origin,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _shorten_names(
            layers, [_to_exported_layer(model, name) for name, _ in model.named_modules() if name]
        ),
        "modules_to_save": _select_outermost(saved_modules) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    _write_json(folder / CONFIG, config)
    write_adapter_metadata(folder, "lora", hashes=lora.hash_frozen_tensors(model), origin=origin)
    write_weights(folder, tensors)


def read_adapter(folder: Path, model: nn.Module, lora: Lora) -> None:
    """Load an adapter into a model's LoRA layers; rank, alpha and layers must match, and with `bottega.json` the base model too."""
    if (folder / METADATA_FILE).exists():
        check_adapter_metadata(read_adapter_metadata(folder, key=START), folder, model, lora, kind="lora", key=START)
    config = _read_json(folder / CONFIG, key=START)
    if config.get("peft_type") != "LORA":
        raise UsageError(f"{START}: {folder / CONFIG} has peft_type {config.get('peft_type')}; only LORA is supported")
    for key, value in config.items():
        if key not in SUPPORTED_KEYS and not _is_empty(value) and value not in NEUTRAL_VALUES.get(key, ()):
            raise UsageError(
                f"{START}: {folder / CONFIG} has {key} {json.dumps(value)}, which is not supported; only plain LoRA is"
            )
    for ours, theirs, value in (("rank", "r", lora.rank), ("alpha", "lora_alpha", lora.alpha)):
        if config.get(theirs) != value:
            raise UsageError(
                f"techniques.lora.{ours} is {value:g}, but {folder} has {config.get(theirs)}; set it to that value"
            )
    targets: dict[str, Tensor] = {
        to_exported_name(model, n): p for n, p in model.named_parameters() if lora.is_trainable(n)
    }
    copy_adapter_tensors(targets, _read_renamed_weights(folder), folder, is_injected=lora.is_injected, technique="lora")


def write_adapter_metadata(
    folder: Path, kind: str, *, hashes: Mapping[str, str], origin: str | None, **fields: Any
) -> None:
    """Write `bottega.json`, with the hashes of the frozen base model."""
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "base": combine_hashes(hashes),
        "from": origin,
        **fields,
    }
    _write_json(folder / METADATA_FILE, {**metadata, "tensors": dict(hashes)})


def read_adapter_metadata(folder: Path, *, key: str) -> dict[str, Any]:
    """Read `bottega.json`; raise if it is missing or of another version."""
    metadata = _read_json(folder / METADATA_FILE, key=key)
    is_known = metadata.get("format") == FORMAT and metadata.get("version") == VERSION
    if not is_known or not isinstance(metadata.get("tensors"), dict):
        raise CheckpointError(f"{folder / METADATA_FILE} is not a {FORMAT} of version {VERSION}; export the run again")
    return metadata


def check_adapter_metadata(
    metadata: Mapping[str, Any], folder: Path, model: nn.Module, task: InjectedTask, *, kind: str, key: str
) -> None:
    """Raise UsageError unless the adapter is of this kind and its base model is the same.

    Tensors frozen in both must be equal; more of them may be trained here.
    """
    if metadata["kind"] != kind:
        raise UsageError(f"{key}: {folder} is an adapter of kind {metadata['kind']}, not {kind}")
    theirs, ours = metadata["tensors"], task.hash_frozen_tensors(model)
    names = model.state_dict().keys()
    changed = [name for name, digest in theirs.items() if name not in names or ours.get(name, digest) != digest]
    if changed:
        origin = metadata.get("from") or "random weights"
        raise UsageError(
            f"{key}: {folder} was trained over another base model ({origin}; {changed[0]} differs); set model.from to it"
        )


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `adapter_model.safetensors`."""
    cpu_tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(cpu_tensors, folder / WEIGHTS, metadata={"format": "pt"})


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read `adapter_model.safetensors`; raise CheckpointError if it is missing or damaged."""
    file = folder / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{file} is missing, and pickles are never read; save the adapter as safetensors")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged ({error}); copy it again") from error


@torch.no_grad()
def copy_adapter_tensors(
    targets: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    folder: Path,
    *,
    is_injected: Callable[[str], bool],
    technique: str,
) -> None:
    """Copy each tensor to its target. Each must have a target, and each injected parameter must have a tensor."""
    unexpected = [name for name in tensors if name not in targets]
    missing = [name for name in targets if name not in tensors and is_injected(name)]
    if unexpected or missing:
        adapted_layers = ", ".join(
            list_name_suffixes({name.rpartition(".")[0] for name in tensors if is_injected(name)})
        )
        problem = f"contains {unexpected[0]}, which is not trained here" if unexpected else f"lacks {missing[0]}"
        raise UsageError(
            f"techniques.{technique}.targets: {folder} {problem}; its layers are {adapted_layers}; set "
            f"techniques.{technique}.targets and techniques.{technique}.train to match them"
        )
    for name, tensor in tensors.items():
        if targets[name].shape != tensor.shape:
            shapes = f"{list(tensor.shape)}, but this model needs {list(targets[name].shape)}"
            raise UsageError(
                f"techniques.{technique}.start: {folder} has {name} of shape {shapes}; set model.from to the model that it "
                "was trained over, or give another folder"
            )
    for name, tensor in tensors.items():
        targets[name].copy_(tensor)


def to_exported_name(model: nn.Module, name: str) -> str:
    """Return the name of a parameter in the library that the exported model is loaded with."""
    if not isinstance(model, PretrainedClassifier):
        return name
    prefix, head_path = model.paths
    module, _, name_inside = name.partition(".")
    exported_names = {"backbone": f"{prefix}.{name_inside}", "head": f"{head_path}.{name_inside}"}
    return exported_names.get(module, name_inside)


def _to_exported_layer(model: nn.Module, name: str) -> str:
    return to_exported_name(model, f"{name}.weight").removesuffix(".weight")


def _choose_task_type(model: nn.Module) -> str | None:
    if isinstance(model, PretrainedClassifier):
        return "SEQ_CLS"
    return "CAUSAL_LM" if hasattr(model, "head_weight") else None


def _find_saved_module(model: nn.Module, owner: str) -> str:
    """Return the module that peft saves: all layers after the encoder, such as `classifier` for `classifier.out_proj`."""
    if not isinstance(model, PretrainedClassifier) or owner.startswith(f"{model.paths[0]}."):
        return owner
    return owner.partition(".")[0]


def _select_outermost(modules: list[str]) -> list[str]:
    return sorted({name for name in modules if not any(name.startswith(f"{other}.") for other in modules)})


def _shorten_names(layers: list[str], all_names: list[str]) -> list[str]:
    """Return suffixes of the names if they match the same layers and no others, else the names."""
    suffixes = list_name_suffixes(layers)
    matches = {name for name in all_names if any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes)}
    return suffixes if matches == set(layers) else layers


def _read_renamed_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights under the names of the base model, with `lora_A` and `lora_B` as parameters."""
    tensors = read_weights(folder)
    names = {name: name.removeprefix(PREFIX) for name in tensors}
    for name, base_name in names.items():
        if base_name.endswith((".lora_A.weight", ".lora_B.weight")):
            names[name] = base_name.removesuffix(".weight")
    return {names[name]: tensor for name, tensor in tensors.items()}


def _is_empty(value: Any) -> bool:
    return all(map(_is_empty, value.values())) if isinstance(value, dict) else not value


def _read_json(path: Path, *, key: str) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"{key}: {path} does not exist; give the folder of an adapter")
    return read_json_object(path)


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
