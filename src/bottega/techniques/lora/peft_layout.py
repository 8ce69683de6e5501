"""The folder of an adapter: in peft's layout, so that it opens there, and read back whoever wrote it.

`adapter_config.json` and `adapter_model.safetensors` are peft's. `bottega.json` is ours, and peft does not look at it: the
`kind` of adapter, the hash of the `base` it was trained over and of each of its `tensors`, and where that came `from`.
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
from bottega.techniques.injected_layers import InjectedTask, combine_hashes, name_suffixes

if TYPE_CHECKING:
    from bottega.techniques.lora.torch import Lora

CONFIG, WEIGHTS, OWN = "adapter_config.json", "adapter_model.safetensors", "bottega.json"
PREFIX = "base_model.model."
FORMAT, VERSION = "bottega-adapter", 1
START = "techniques.lora.start"
UNDERSTOOD = (
    *("peft_type", "r", "lora_alpha"),  # compared
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout",),  # of training, where ours counts
    # Which layers: the names of the tensors say so too.
    *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern"),
)
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal"),  # others, such as pissa, change the base as well
    "megatron_core": ("megatron.core",),
    "qalora_group_size": (16,),
}
"""What peft says by default, or what changes nothing once the tensors are there. All else must be null, empty or false: it
would load without a complaint and compute something else, and peft learns new words faster than a list of them grows."""


def write_adapter(model: nn.Module, folder: Path, lora: Lora, *, origin: str | None) -> None:
    """What was put into a model, and the parts that learnt beside it."""
    from bottega.techniques.lora.torch import NAMES, find_low_rank_layers

    folder.mkdir(parents=True, exist_ok=True)
    tensors, saved = dict[str, Tensor](), list[str]()
    for name, parameter in model.named_parameters():
        if not lora.is_trainable(name):
            continue
        owner, _, kind = exported_name(model, name).rpartition(".")
        if kind in NAMES:
            tensors[f"{PREFIX}{owner}.{kind}.weight"] = parameter
        else:
            tensors[f"{PREFIX}{owner}.{kind}"] = parameter
            saved.append(_saved_part(model, owner))
    layers = [_their_layer(model, name) for name in find_low_rank_layers(model)]
    config = {
        "peft_type": "LORA",
        "task_type": _task_type(model),
        "base_model_name_or_path": origin,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _shortest(layers, [_their_layer(model, name) for name, _ in model.named_modules() if name]),
        "modules_to_save": _outermost(saved) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    _write(folder / CONFIG, config)
    write_adapter_metadata(folder, "lora", hashes=lora.hash_frozen_tensors(model), origin=origin)
    write_weights(folder, tensors)


def read_adapter(folder: Path, model: nn.Module, lora: Lora) -> None:
    """Fill what was put into a model; the folder must be of the same rank, scale and layers, and ours of the same base."""
    if (folder / OWN).exists():
        check_adapter_metadata(read_adapter_metadata(folder, key=START), folder, model, lora, kind="lora", key=START)
    config = _read(folder / CONFIG, key=START)
    if config.get("peft_type") != "LORA":
        raise UsageError(f"{START}: {folder / CONFIG} is of {config.get('peft_type')}, not of LORA")
    for key, value in config.items():
        if key not in UNDERSTOOD and not _is_nothing(value) and value not in PLAIN.get(key, ()):
            said = json.dumps(value)
            raise UsageError(f"{START}: {folder / CONFIG} has {key} {said}, which is not supported; plain LoRA is")
    for ours, theirs, asked in (("rank", "r", lora.rank), ("alpha", "lora_alpha", lora.alpha)):
        if config.get(theirs) != asked:
            raise UsageError(
                f"techniques.lora.{ours}: {asked:g}, and {folder} has {config.get(theirs)}; set it to that"
            )
    places: dict[str, Tensor] = {
        exported_name(model, n): p for n, p in model.named_parameters() if lora.is_trainable(n)
    }
    copy_adapter_tensors(places, _tensors(folder), folder, is_own=lora.is_injected, technique="lora")


def write_adapter_metadata(
    folder: Path, kind: str, *, hashes: Mapping[str, str], origin: str | None, **more: Any
) -> None:
    said = {"format": FORMAT, "version": VERSION, "kind": kind, "base": combine_hashes(hashes), "from": origin, **more}
    _write(folder / OWN, {**said, "tensors": dict(hashes)})


def read_adapter_metadata(folder: Path, *, key: str) -> dict[str, Any]:
    said = _read(folder / OWN, key=key)
    if said.get("format") != FORMAT or said.get("version") != VERSION or not isinstance(said.get("tensors"), dict):
        raise CheckpointError(f"{folder / OWN}: is no {FORMAT} of version {VERSION}; export its run again")
    return said


def check_adapter_metadata(
    said: Mapping[str, Any], folder: Path, model: nn.Module, task: InjectedTask, *, kind: str, key: str
) -> None:
    """Of this kind, and trained over this base: what stayed there and stays here is the same. More of it may learn here."""
    if said["kind"] != kind:
        raise UsageError(f"{key}: {folder} is of kind {said['kind']}, not {kind}")
    there, here = said["tensors"], task.hash_frozen_tensors(model)
    names = model.state_dict().keys()
    other = [name for name, found in there.items() if name not in names or here.get(name, found) != found]
    if other:
        named = said.get("from") or "random weights"
        raise UsageError(
            f"{key}: {folder} was trained over another base ({named}; {other[0]} differs); start over that one"
        )


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_host, folder / WEIGHTS, metadata={"format": "pt"})


def read_weights(folder: Path) -> dict[str, Tensor]:
    file = folder / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{file}: is not there, and pickles are never opened; save the adapter as safetensors")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: is damaged ({error}); copy it again") from error


@torch.no_grad()
def copy_adapter_tensors(
    places: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    folder: Path,
    *,
    is_own: Callable[[str], bool],
    technique: str,
) -> None:
    """Copy each tensor to its place. All that is there must have one, and all parts that were put in must be there."""
    strange = [name for name in found if name not in places]
    missing = [name for name in places if name not in found and is_own(name)]
    if strange or missing:
        has = ", ".join(name_suffixes({name.rpartition(".")[0] for name in found if is_own(name)}))
        one = f"holds {strange[0]}, which does not learn here" if strange else f"lacks {missing[0]}"
        raise UsageError(
            f"techniques.{technique}.targets: {folder} {one}; it has {has}, so set targets and train to what it has"
        )
    for name, tensor in found.items():
        if places[name].shape != tensor.shape:
            shapes = f"{list(tensor.shape)}, not {list(places[name].shape)}"
            raise UsageError(f"techniques.{technique}.start: {folder} has {name} of {shapes}")
    for name, tensor in found.items():
        places[name].copy_(tensor)


def exported_name(model: nn.Module, name: str) -> str:
    """As the library that opens the model calls a parameter of it."""
    if not isinstance(model, PretrainedClassifier):
        return name
    prefix, path = model.paths
    part, _, rest = name.partition(".")
    return {"backbone": f"{prefix}.{rest}", "head": f"{path}.{rest}"}.get(part, rest)


def _their_layer(model: nn.Module, name: str) -> str:
    return exported_name(model, f"{name}.weight").removesuffix(".weight")


def _task_type(model: nn.Module) -> str | None:
    if isinstance(model, PretrainedClassifier):
        return "SEQ_CLS"
    return "CAUSAL_LM" if hasattr(model, "head_weight") else None


def _saved_part(model: nn.Module, owner: str) -> str:
    """peft saves the whole of what stands after an encoder, such as `classifier` for `classifier.out_proj`."""
    if not isinstance(model, PretrainedClassifier) or owner.startswith(f"{model.paths[0]}."):
        return owner
    return owner.partition(".")[0]


def _outermost(parts: list[str]) -> list[str]:
    return sorted({one for one in parts if not any(one.startswith(f"{other}.") for other in parts)})


def _shortest(layers: list[str], every: list[str]) -> list[str]:
    """The ends of the names where those mean the same layers and no others, as people write them."""
    short = name_suffixes(layers)
    meant = {name for name in every if any(name == end or name.endswith(f".{end}") for end in short)}
    return short if meant == set(layers) else layers


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Under the base's names, with A and B as we call them."""
    found = read_weights(folder)
    names = {name: name.removeprefix(PREFIX) for name in found}
    for name, short in names.items():
        if short.endswith((".lora_A.weight", ".lora_B.weight")):
            names[name] = short.removesuffix(".weight")
    return {names[name]: tensor for name, tensor in found.items()}


def _is_nothing(value: Any) -> bool:
    return all(map(_is_nothing, value.values())) if isinstance(value, dict) else not value


def _read(path: Path, *, key: str) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"{key}: {path} cannot be read (no such file); name an adapter's folder")
    return read_json_object(path)


def _write(path: Path, said: dict[str, Any]) -> None:
    path.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
