"""Folders of autoencoders: config.json and safetensors in the layout of diffusers; no remote code, no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bottega.core.errors import CheckpointError, UsageError
from bottega.schema.vae import AutoencoderShape

WEIGHTS = "diffusion_pytorch_model.safetensors"
OURS = "BottegaAutoencoder"
"""The class named in the config of sound and video, for which diffusers has no equal one."""

DEFAULTS: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ["DownEncoderBlock2D"],
    "up_block_types": ["UpDecoderBlock2D"],
    "block_out_channels": [64],
    "layers_per_block": 1,
    "act_fn": "silu",
    "latent_channels": 4,
    "norm_num_groups": 32,
    "scaling_factor": 0.18215,
    "shift_factor": None,
    "latents_mean": None,
    "latents_std": None,
    "use_quant_conv": True,
    "use_post_quant_conv": True,
    "mid_block_add_attention": True,
}
"""What AutoencoderKL takes for a key that a config leaves out; older files have few of them."""

OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
"""Attention as it was named until 2023; Stable Diffusion 1's files still are."""


def diffusers_config(shape: AutoencoderShape, *, sample_size: int) -> dict[str, Any]:
    """The arguments of an AutoencoderKL with this shape."""
    if shape.dims != 2:
        raise UsageError(f"an autoencoder over {shape.dims} axes has no form in diffusers; only images have")
    stages = len(shape.widths)
    return {
        "in_channels": shape.channels,
        "out_channels": shape.channels,
        "down_block_types": ["DownEncoderBlock2D"] * stages,
        "up_block_types": ["UpDecoderBlock2D"] * stages,
        "block_out_channels": list(shape.widths),
        "layers_per_block": shape.layers_per_block,
        "act_fn": "silu",
        "latent_channels": shape.latent_channels,
        "norm_num_groups": shape.groups,
        "sample_size": sample_size,
        "scaling_factor": shape.scaling_factor,
        "shift_factor": shape.shift_factor or None,
        "use_quant_conv": shape.quant_conv,
        "use_post_quant_conv": shape.quant_conv,
        "mid_block_add_attention": shape.mid_attention,
    }


def export_autoencoder(
    state: Mapping[str, Tensor], shape: AutoencoderShape, folder: Path | str, *, sample_size: int = 256
) -> Path:
    """Write config.json and the weights; those of images open with AutoencoderKL.from_pretrained."""
    folder = Path(folder)
    config: dict[str, Any] = {"_class_name": OURS, **shape.model_dump(mode="json")}
    if shape.dims == 2:
        # The oldest version that we are tested with: a library warns about files of a newer one than itself.
        config = {"_class_name": "AutoencoderKL", "_diffusers_version": "0.36.0"}
        config |= diffusers_config(shape, sample_size=sample_size)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in state.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def read_autoencoder_shape(folder: Path | str) -> AutoencoderShape:
    """The shape of a folder's model, refused unless our model computes it exactly."""
    path = Path(folder) / "config.json"
    config = _json(path)
    kind = config.get("_class_name", "AutoencoderKL")
    if kind not in ("AutoencoderKL", OURS):
        raise UsageError(f"{path}: {kind} is not supported; supported: AutoencoderKL")
    try:
        if kind == OURS:
            return AutoencoderShape(**{key: value for key, value in config.items() if key != "_class_name"})
        return _from_diffusers({**DEFAULTS, **config}, path)
    except (ValidationError, TypeError) as error:
        first = "; ".join(str(error).splitlines()[1:3]) if isinstance(error, ValidationError) else str(error)
        raise CheckpointError(f"{path}: is no config of an autoencoder ({first})") from error


def _from_diffusers(config: Mapping[str, Any], path: Path) -> AutoencoderShape:
    _check_exact(config, path)
    shape = AutoencoderShape(
        channels=config["in_channels"],
        latent_channels=config["latent_channels"],
        widths=tuple(config["block_out_channels"]),
        layers_per_block=config["layers_per_block"],
        norm_groups=config["norm_num_groups"],
        mid_attention=config["mid_block_add_attention"],
        quant_conv=config["use_quant_conv"],
        scaling_factor=config["scaling_factor"],
        shift_factor=config["shift_factor"] or 0.0,
    )
    if shape.groups != config["norm_num_groups"]:
        raise CheckpointError(
            f"{path}: norm_num_groups {config['norm_num_groups']} does not divide every one of {list(shape.widths)}"
        )
    return shape


def _check_exact(config: Mapping[str, Any], path: Path) -> None:
    """Refuse what would load without a complaint and compute something else."""
    down, up = config["down_block_types"], config["up_block_types"]
    problems = {
        f"out_channels {config['out_channels']}": config["out_channels"] != config["in_channels"],
        f"down_block_types {down}": set(down) != {"DownEncoderBlock2D"},
        f"up_block_types {up}": set(up) != {"UpDecoderBlock2D"},
        f"act_fn {config['act_fn']!r}": config["act_fn"] not in ("silu", "swish"),
        "use_quant_conv without use_post_quant_conv": config["use_quant_conv"] != config["use_post_quant_conv"],
        "latents_mean": config["latents_mean"] is not None or config["latents_std"] is not None,
    }
    for problem, present in problems.items():
        if present:
            raise UsageError(
                f"{path}: {problem} is not supported; supported is AutoencoderKL as Stable Diffusion has it"
            )


def read_autoencoder_tensors(folder: Path | str, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a folder under the names and in the shapes of `wanted`, all of them and no others."""
    file = Path(folder) / WEIGHTS
    found = {_current_name(name): tensor for name, tensor in _tensors(file).items()}
    missing, unexpected = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unexpected:
        name, what = (missing[0], "lacks") if missing else (unexpected[0], "holds")
        raise CheckpointError(
            f"{file}: {what} {name} ({len(missing)} missing, {len(unexpected)} unexpected tensors); "
            "it does not belong to the config.json beside it"
        )
    for name, tensor in wanted.items():
        # Some early files keep the attention's matrices as 1 x 1 convolutions.
        is_matrix = tensor.dim() == 2 and found[name].shape == (*tensor.shape, 1, 1)
        if found[name].shape != tensor.shape and not is_matrix:
            raise CheckpointError(
                f"{file}: {name} has shape {list(found[name].shape)}, its config.json needs {list(tensor.shape)}"
            )
    return {name: found[name].reshape(tensor.shape) for name, tensor in wanted.items()}


def _tensors(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        folder = file.parent
        pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(
            path.name for path in folder.glob("*.pt*")
        )
        if pickles:
            raise CheckpointError(
                f"{folder}: {pickles[0]} is a pickle, which can run code and is never opened; "
                "convert it with diffusers: model.save_pretrained(folder, safe_serialization=True)"
            )
        raise CheckpointError(f"{folder}: no {file.name} in it; give the folder of a saved AutoencoderKL")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: is damaged ({error}); download it again") from error


def _current_name(name: str) -> str:
    owner, _, kind = name.rpartition(".")
    owner, _, last = owner.rpartition(".")
    return f"{owner}.{OLD_NAMES[last]}.{kind}" if "attentions." in owner and last in OLD_NAMES else name


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); give the folder of a saved model") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__} where an object was expected")
    return found
