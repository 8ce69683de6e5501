"""The folder of an adapter: in peft's layout, so that it opens there, and read back whoever wrote it.

`adapter_config.json` and `adapter_model.safetensors` are peft's. `bottega.json` is ours, and peft does not look at it: the
`kind` of adapter, the hash of the `base` it was trained over, and where that came `from`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bottega.core.errors import CheckpointError, UsageError
from bottega.models.pretrained_classifier import PretrainedClassifier
from bottega.techniques.inject import ends

if TYPE_CHECKING:
    from bottega.techniques.lora import Lora

CONFIG, WEIGHTS, OWN = "adapter_config.json", "adapter_model.safetensors", "bottega.json"
PREFIX = "base_model.model."
FORMAT, VERSION = "bottega-adapter", 1
UNSUPPORTED = ("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias", "rank_pattern", "alpha_pattern")
"""What would load without a complaint and compute something else."""


def write_adapter(model: nn.Module, folder: Path, lora: Lora, *, base: str, start: str | None) -> None:
    """What was put into a model, and the parts that learnt beside it."""
    from bottega.techniques.lora import NAMES, changed_layers

    folder.mkdir(parents=True, exist_ok=True)
    tensors, saved = dict[str, Tensor](), list[str]()
    for name, parameter in model.named_parameters():
        if not lora.learns(name):
            continue
        owner, _, kind = their_name(model, name).rpartition(".")
        if kind in NAMES:
            tensors[f"{PREFIX}{owner}.{kind}.weight"] = parameter
        else:
            tensors[f"{PREFIX}{owner}.{kind}"] = parameter
            saved.append(_saved_part(model, owner))
    layers = [_their_layer(model, name) for name in changed_layers(model)]
    config = {
        "peft_type": "LORA",
        "task_type": _task_type(model),
        "base_model_name_or_path": start,
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
    write_own(folder, "lora", base=base, start=start)
    save_file(on_host(tensors), folder / WEIGHTS, metadata={"format": "pt"})


def write_own(folder: Path, kind: str, *, base: str, start: str | None, **more: Any) -> None:
    said = {"format": FORMAT, "version": VERSION, "kind": kind, "base": base, "from": start, **more}
    _write(folder / OWN, said)


def on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


@torch.no_grad()
def read_adapter(folder: Path, model: nn.Module, *, rank: int, alpha: float, learns: Callable[[str], bool]) -> None:
    """Fill what was put into a model; the folder must be of the same rank, scale and layers."""
    config = _read(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise UsageError(f"lora.start: {folder / CONFIG} is of {config.get('peft_type')}, not of LORA")
    for key in UNSUPPORTED:
        if config.get(key):
            raise UsageError(f"lora.start: {folder / CONFIG} has {key} {config[key]}, which is not supported")
    for ours, theirs, asked in (("rank", "r", rank), ("alpha", "lora_alpha", alpha)):
        if config.get(theirs) != asked:
            raise UsageError(f"lora.{ours}: {asked:g}, and {folder} has {config.get(theirs)}; set it to that")
    found, wanted = _tensors(folder), {n: p for n, p in model.named_parameters() if learns(n)}
    places = {their_name(model, name): name for name in wanted}
    strange = [name for name in found if name not in places]
    missing = [n for n, ours in places.items() if n not in found and n.rpartition(".")[2] in ("lora_A", "lora_B")]
    if strange or missing:
        has = ", ".join(ends({name.rpartition(".")[0] for name in found if name.endswith(".lora_A")}))
        one = f"holds {strange[0]}, which does not learn here" if strange else f"lacks {missing[0]}"
        raise UsageError(f"lora.targets: {folder} {one}; it has {has}, so set targets and train to what it has")
    for name, tensor in found.items():
        parameter = wanted[places[name]]
        if parameter.shape != tensor.shape:
            raise UsageError(f"lora.start: {folder} has {name} of {list(tensor.shape)}, not {list(parameter.shape)}")
        parameter.copy_(tensor)


def their_name(model: nn.Module, name: str) -> str:
    """As the library that opens the model calls a parameter of it."""
    if not isinstance(model, PretrainedClassifier):
        return name
    prefix, path = model.paths
    part, _, rest = name.partition(".")
    return {"backbone": f"{prefix}.{rest}", "head": f"{path}.{rest}"}.get(part, rest)


def _their_layer(model: nn.Module, name: str) -> str:
    return their_name(model, f"{name}.weight").removesuffix(".weight")


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
    short = ends(layers)
    meant = {name for name in every if any(name == end or name.endswith(f".{end}") for end in short)}
    return short if meant == set(layers) else layers


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Under the base's names, with A and B as we call them."""
    file = folder / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{file}: is not there, and pickles are never opened; save the adapter as safetensors")
    try:
        found = load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: is damaged ({error}); copy it again") from error
    names = {name: name.removeprefix(PREFIX) for name in found}
    for name, short in names.items():
        if short.endswith((".lora_A.weight", ".lora_B.weight")):
            names[name] = short.removesuffix(".weight")
    return {names[name]: tensor for name, tensor in found.items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"lora.start: {path} cannot be read ({error.strerror}); name an adapter's folder") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__} where an object was expected")
    return found


def _write(path: Path, said: dict[str, Any]) -> None:
    path.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
