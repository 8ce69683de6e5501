"""Converts class-conditional diffusion transformers to and from diffusers' DiTTransformer2DModel.

The weights are tensors of torch or arrays of numpy.

D hidden size   K classes   p side of a patch   C channels
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bottega.core.types import Array
from bottega.models.generator.config import EPSILON, DiTShape, GeneratorShape

DIFFUSERS_CLASS = "DiTTransformer2DModel"
NULL_CLASS = 1000
"""The class index that DiTPipeline uses for no class, whatever the number of classes."""

_OUTER_NAMES = {
    "pos_embed.proj.bias": "backbone.embed.bias",
    "proj_out_1.weight": "backbone.modulation_out.weight",
    "proj_out_1.bias": "backbone.modulation_out.bias",
    "proj_out_2.weight": "backbone.out.weight",
    "proj_out_2.bias": "backbone.out.bias",
}
_BLOCK_NAMES = {
    "norm1.linear": "modulation",
    "attn1.to_q": "attn.to_q",
    "attn1.to_k": "attn.to_k",
    "attn1.to_v": "attn.to_v",
    "attn1.to_out.0": "attn.to_out",
    "ff.net.0.proj": "up",
    "ff.net.2": "down",
}
_TIME_NAMES = {
    "norm1.emb.timestep_embedder.linear_1": "backbone.time.linear_1",
    "norm1.emb.timestep_embedder.linear_2": "backbone.time.linear_2",
}
_CLASS_TABLE = "norm1.emb.class_embedder.embedding_table.weight"
_PATCH_WEIGHT = "pos_embed.proj.weight"


def is_diffusers_compatible(shape: GeneratorShape) -> bool:
    """Return whether DiTTransformer2DModel can compute this model: it needs square images and patches, and classes."""
    backbone = shape.backbone
    return (
        isinstance(backbone, DiTShape)
        and len(backbone.grid) == 2
        and len(set(backbone.grid)) == len(set(backbone.patch)) == 1
        and backbone.attention == "full"
        and shape.condition.kind == "class"
        and shape.condition.size <= NULL_CLASS
    )


def diffusers_config(shape: DiTShape) -> dict[str, Any]:
    """Return the configuration of a DiTTransformer2DModel with this shape."""
    return {
        "_class_name": DIFFUSERS_CLASS,
        "num_attention_heads": shape.num_heads,
        "attention_head_dim": shape.hidden_size // shape.num_heads,
        "in_channels": shape.channels,
        "out_channels": shape.channels,
        "num_layers": shape.num_layers,
        "dropout": shape.dropout,
        "attention_bias": True,
        "sample_size": shape.grid[0],
        "patch_size": shape.patch[0],
        "activation_fn": "gelu-approximate",
        "num_embeds_ada_norm": NULL_CLASS,
        "norm_type": "ada_norm_zero",
        "norm_elementwise_affine": False,
        "norm_eps": EPSILON,
    }


def to_diffusers(state: Mapping[str, Array], shape: DiTShape) -> dict[str, Array]:
    """Return our tensors under diffusers' names.

    diffusers repeats the time and class embedding in every block; its table is padded with our row for no class.
    """
    table = state["condition.embedding.weight"]
    rows = np.minimum(np.arange(NULL_CLASS + 1), len(table) - 1)
    table = table[rows]
    side, channels = shape.patch[0], shape.channels
    tensors = {theirs: state[ours] for theirs, ours in _OUTER_NAMES.items()}
    patches = state["backbone.embed.weight"].reshape(-1, side, side, channels)
    tensors[_PATCH_WEIGHT] = _move_axis(patches, -1, 1)
    for i in range(shape.num_layers):
        block = f"transformer_blocks.{i}"
        tensors[f"{block}.{_CLASS_TABLE}"] = table
        for kind in ("weight", "bias"):
            tensors |= {f"{block}.{theirs}.{kind}": state[f"{ours}.{kind}"] for theirs, ours in _TIME_NAMES.items()}
            tensors |= {
                f"{block}.{theirs}.{kind}": state[f"backbone.blocks.{i}.{ours}.{kind}"]
                for theirs, ours in _BLOCK_NAMES.items()
            }
    # A copy for each name: safetensors refuses tensors that share memory.
    return {name: _copy(tensor) for name, tensor in tensors.items()}


def from_diffusers(state: Mapping[str, Array]) -> dict[str, Array]:
    """Return diffusers' tensors under our names; unknown ones keep their name, so that a comparison reports them."""
    names = dict(_OUTER_NAMES)
    for name in state:
        if not name.startswith("transformer_blocks."):
            continue
        _, number, block_name = name.split(".", 2)
        module, _, kind = block_name.rpartition(".")
        if module in _BLOCK_NAMES:
            names[name] = f"backbone.blocks.{number}.{_BLOCK_NAMES[module]}.{kind}"
        elif module in _TIME_NAMES and number == "0":
            names[name] = f"{_TIME_NAMES[module]}.{kind}"
    tensors = {names.get(name, name): tensor for name, tensor in state.items()}
    # Drop the repeated embeddings of the blocks after the first.
    tensors = {name: tensor for name, tensor in tensors.items() if ".norm1.emb." not in name}
    padded_table = state.get(f"transformer_blocks.0.{_CLASS_TABLE}")
    if padded_table is not None:
        tensors["condition.embedding.weight"] = _trim_padding(padded_table)
    patches = tensors.pop(_PATCH_WEIGHT, None)
    if patches is not None:
        tensors["backbone.embed.weight"] = _copy(_move_axis(patches, 1, -1).reshape(len(patches), -1))
    return tensors


def _trim_padding(table: Array) -> Array:
    """Return the rows of the classes, and once the row for no class that is repeated at the end, (K + 1, D)."""
    # The first row from which all are the last one.
    size = len(table) - 1
    while size > 0 and bool((table[size - 1] == table[-1]).all()):
        size -= 1
    return table[: size + 1]


def _move_axis(x: Array, source: int, target: int) -> Array:
    return np.moveaxis(x, source, target) if isinstance(x, np.ndarray) else x.movedim(source, target)


def _copy(x: Array) -> Array:
    """Return a contiguous copy."""
    return x.copy(order="C") if isinstance(x, np.ndarray) else x.clone().contiguous()
