"""Read and write autoencoders in the folder layout of diffusers: config.json and safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bottega.core.errors import CheckpointError, UsageError
from bottega.core.types import Array
from bottega.models.autoencoder.config import AutoencoderShape
from bottega.models.pipeline.component import CONFIG, read_component, read_config, write_component

BOTTEGA_CLASS = "BottegaAutoencoder"
"""The class name in the config of audio and video autoencoders, which have no equivalent in diffusers."""

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
"""AutoencoderKL's defaults for missing keys; older files have few keys. Copied, so that diffusers need not be imported."""


def diffusers_config(shape: AutoencoderShape, *, sample_size: int) -> dict[str, Any]:
    """Return the arguments of an AutoencoderKL with this shape."""
    if shape.dims != 2:
        raise UsageError(
            f"diffusers has no autoencoder for data with {shape.dims} axes; only image autoencoders can be exported"
        )
    num_stages = len(shape.widths)
    return {
        "in_channels": shape.channels,
        "out_channels": shape.channels,
        "down_block_types": ["DownEncoderBlock2D"] * num_stages,
        "up_block_types": ["UpDecoderBlock2D"] * num_stages,
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
    state: Mapping[str, Array], shape: AutoencoderShape, folder: Path | str, *, sample_size: int = 256
) -> Path:
    """Write config.json and weights; AutoencoderKL.from_pretrained can load image autoencoders."""
    folder = Path(folder)
    config: dict[str, Any] = {"_class_name": BOTTEGA_CLASS, **shape.model_dump(mode="json")}
    if shape.dims == 2:
        config = {"_class_name": "AutoencoderKL", **diffusers_config(shape, sample_size=sample_size)}
    write_component(folder, config, state)
    return folder


def read_autoencoder_shape(folder: Path | str) -> AutoencoderShape:
    """Return the shape of a folder's autoencoder; raise `UsageError` if our model cannot compute the same as diffusers."""
    path = Path(folder) / CONFIG
    config = read_config(Path(folder))
    class_name = config.get("_class_name", "AutoencoderKL")
    if class_name not in ("AutoencoderKL", BOTTEGA_CLASS):
        raise UsageError(f"{path}: {class_name} is not supported; supported: AutoencoderKL")
    try:
        if class_name == BOTTEGA_CLASS:
            return AutoencoderShape(**{key: value for key, value in config.items() if not key.startswith("_")})
        return _convert_diffusers_config({**DEFAULTS, **config}, path)
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        reason = "; ".join(str(error).splitlines()[1:3]) if isinstance(error, ValidationError) else str(error)
        raise CheckpointError(
            f"{path} is not the config of an autoencoder ({reason}); download or export the model again"
        ) from error


def _convert_diffusers_config(config: Mapping[str, Any], path: Path) -> AutoencoderShape:
    _check_supported(config, path)
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
            f"{path}: norm_num_groups {config['norm_num_groups']} does not divide all of block_out_channels "
            f"{list(shape.widths)}"
        )
    return shape


def _check_supported(config: Mapping[str, Any], path: Path) -> None:
    """Raise `UsageError` for options that our model lacks: their weights could load, but the outputs would differ."""
    down, up = config["down_block_types"], config["up_block_types"]
    problems = {
        f"out_channels {config['out_channels']}": config["out_channels"] != config["in_channels"],
        f"down_block_types {down}": set(down) != {"DownEncoderBlock2D"},
        f"up_block_types {up}": set(up) != {"UpDecoderBlock2D"},
        f"act_fn {config['act_fn']!r}": config["act_fn"] not in ("silu", "swish"),
        f"use_quant_conv {config['use_quant_conv']} with use_post_quant_conv {config['use_post_quant_conv']}": (
            config["use_quant_conv"] != config["use_post_quant_conv"]
        ),
        "latents_mean": config["latents_mean"] is not None or config["latents_std"] is not None,
    }
    for problem, is_present in problems.items():
        if is_present:
            raise UsageError(f"{path}: {problem} is not supported; use an AutoencoderKL as in Stable Diffusion")


def read_autoencoder_tensors(
    folder: Path | str, expected: Mapping[str, tuple[int, ...]], *, framework: str = "torch"
) -> dict[str, Array]:
    """Return the tensors of a folder; their names and shapes must be exactly those of `expected`."""
    tensors = read_component(Path(folder), framework=framework)
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unexpected:
        name, verb = (missing[0], "lacks") if missing else (unexpected[0], "contains")
        raise CheckpointError(
            f"{folder} {verb} {name} ({len(missing)} missing, {len(unexpected)} unexpected tensors); "
            "the weights do not match config.json; download or export the model again"
        )
    for name, shape in expected.items():
        # Some early files store the attention's matrices as 1 x 1 convolutions.
        is_1x1_conv = len(shape) == 2 and tuple(tensors[name].shape) == (*shape, 1, 1)
        if tuple(tensors[name].shape) != tuple(shape) and not is_1x1_conv:
            raise CheckpointError(
                f"{folder}: {name} has shape {list(tensors[name].shape)}, but its config.json needs {list(shape)}; "
                "download or export the model again"
            )
    return {name: tensors[name].reshape(shape) for name, shape in expected.items()}
