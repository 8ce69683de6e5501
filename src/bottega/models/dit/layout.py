"""Converts class-conditional diffusion transformers to and from diffusers' DiTTransformer2DModel.

D hidden size   K classes   p side of a patch   C channels
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bottega.models.dit.torch import EPSILON
from bottega.models.generator.config import DiTShape, GeneratorShape

CLASS = "DiTTransformer2DModel"
NULL_CLASS = 1000
"""The class index that DiTPipeline uses for no class, whatever the number of classes."""

_OUTER = {
    "pos_embed.proj.bias": "backbone.embed.bias",
    "proj_out_1.weight": "backbone.modulation_out.weight",
    "proj_out_1.bias": "backbone.modulation_out.bias",
    "proj_out_2.weight": "backbone.out.weight",
    "proj_out_2.bias": "backbone.out.bias",
}
_BLOCK = {
    "norm1.linear": "modulation",
    "attn1.to_q": "attn.to_q",
    "attn1.to_k": "attn.to_k",
    "attn1.to_v": "attn.to_v",
    "attn1.to_out.0": "attn.to_out",
    "ff.net.0.proj": "up",
    "ff.net.2": "down",
}
_TIME = {
    "norm1.emb.timestep_embedder.linear_1": "backbone.time.linear_1",
    "norm1.emb.timestep_embedder.linear_2": "backbone.time.linear_2",
}
_TABLE = "norm1.emb.class_embedder.embedding_table.weight"
_PATCHES = "pos_embed.proj.weight"


def is_diffusers_compatible(shape: GeneratorShape) -> bool:
    """Return whether DiTTransformer2DModel computes the same: square images and patches, conditioned on classes."""
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
        "_class_name": CLASS,
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


def to_diffusers(state: Mapping[str, Tensor], shape: DiTShape) -> dict[str, Tensor]:
    """Return our tensors under diffusers' names.

    diffusers repeats the time and class embedding in every block; its table is padded with our row for no class.
    """
    table = state["condition.embedding.weight"]
    table = torch.cat((table, table[-1:].expand(NULL_CLASS + 1 - len(table), -1)))
    side, channels = shape.patch[0], shape.channels
    tensors = {theirs: state[ours] for theirs, ours in _OUTER.items()}
    patches = state["backbone.embed.weight"].view(-1, side, side, channels)
    tensors[_PATCHES] = patches.permute(0, 3, 1, 2)
    for i in range(shape.num_layers):
        block = f"transformer_blocks.{i}"
        tensors[f"{block}.{_TABLE}"] = table
        for kind in ("weight", "bias"):
            tensors |= {f"{block}.{theirs}.{kind}": state[f"{ours}.{kind}"] for theirs, ours in _TIME.items()}
            tensors |= {
                f"{block}.{theirs}.{kind}": state[f"backbone.blocks.{i}.{ours}.{kind}"]
                for theirs, ours in _BLOCK.items()
            }
    # A copy for each name: safetensors refuses tensors that share memory.
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def from_diffusers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return diffusers' tensors under our names; unknown ones keep their name, so that a comparison reports them."""
    names = dict(_OUTER)
    for name in state:
        if not name.startswith("transformer_blocks."):
            continue
        _, number, rest = name.split(".", 2)
        stem, _, kind = rest.rpartition(".")
        if stem in _BLOCK:
            names[name] = f"backbone.blocks.{number}.{_BLOCK[stem]}.{kind}"
        elif stem in _TIME and number == "0":
            names[name] = f"{_TIME[stem]}.{kind}"
    tensors = {names.get(name, name): tensor for name, tensor in state.items()}
    # The repeated embeddings of the blocks after the first.
    tensors = {name: tensor for name, tensor in tensors.items() if ".norm1.emb." not in name}
    first = state.get(f"transformer_blocks.0.{_TABLE}")
    if first is not None:
        tensors["condition.embedding.weight"] = _trim_padding(first)
    patches = tensors.pop(_PATCHES, None)
    if patches is not None:
        tensors["backbone.embed.weight"] = patches.permute(0, 2, 3, 1).flatten(1).contiguous()
    return tensors


def _trim_padding(table: Tensor) -> Tensor:
    """Return the rows of the classes and the last row once, (K + 1, D)."""
    is_other = (table != table[-1]).any(1).nonzero()
    size = int(is_other[-1]) + 1 if len(is_other) else 0
    return torch.cat((table[:size], table[-1:]))
