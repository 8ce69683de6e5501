"""diffusers' UNet as a backbone, with our own sizes or the configuration of a folder.

The model is diffusers' own class (UNet2DModel, or UNet2DConditionModel for text), so that diffusers can load exports.

B batch   h w height and width   C channels   D size of the time embedding   L text tokens   W size of a text token
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bottega.core.errors import EnvironmentProblem, UsageError
from bottega.models.folders.untrusted import attribute_errors_to
from bottega.models.generator.config import UNetShape
from bottega.models.generator.layout import UNET_CLASSES, find_unet_folder
from bottega.models.initial_conv import initial_convolution
from bottega.models.pipeline.component import read_config

UNCONDITIONAL_CLASS, CONDITIONAL_CLASS = UNET_CLASSES
MAX_ATTENTION_SIDE = 32
"""Largest side of a stage with attention: 32 x 32 positions have 1 million pairs, 64 x 64 have 16 million."""
MAX_WIDTH_FACTOR = 4
"""Each stage has twice the channels of the previous one, up to this many times the first."""
MAX_GROUPS = 32
UNSUPPORTED_OPTIONS = ("addition_embed_type", "encoder_hid_dim_type", "num_class_embeds", "time_cond_proj_dim")
"""Options of diffusers that need inputs other than time, one vector and text."""


class UNet(nn.Module):
    """Backbone with the interface of `DiT`; `unet` is diffusers' model."""

    def __init__(self, shape: UNetShape) -> None:
        super().__init__()
        self.shape = shape
        self.has_text = shape.context_size is not None
        if shape.config is None:
            self.unet: Any = _build_unet(build_unet_config(shape))
        else:
            with attribute_errors_to("model.from"):
                self.unet = _build_unet(build_unet_config(shape))
        self.compiled: Callable[..., Any] | None = None

    def forward(
        self,
        x: Tensor,
        time: Tensor,
        *,
        vector: Tensor | None = None,
        context: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the prediction (B, h, w, C) for x (B, h, w, C) and time (B) in 0..1,000.

        `vector` (B, D) is added to the time embedding; `context` (B, L, W) is text with `mask` (B, L), true for tokens.
        """
        conditions: dict[str, Any] = {"class_labels": vector} if vector is not None else {}
        if self.has_text:
            conditions |= {"encoder_hidden_states": context, "encoder_attention_mask": mask}
        compute = self.compiled if self.compiled is not None and self.training else self.unet
        # Contiguous, because a channels-last view gives 1 x 1 kernels gradients in a layout that replicas cannot share.
        (output,) = compute(x.movedim(-1, 1).contiguous(), time, **conditions, return_dict=False)
        return output.movedim(1, -1)

    @property
    def checkpoint_blocks(self) -> bool:
        return bool(self.unet.is_gradient_checkpointing)

    @checkpoint_blocks.setter
    def checkpoint_blocks(self, value: bool) -> None:
        if value:
            self.unet.enable_gradient_checkpointing()
        else:
            self.unet.disable_gradient_checkpointing()

    def compile_whole(self, *, use_cuda_graphs: bool) -> None:
        """Compile the model; never as CUDA graphs, because convolutions choose their algorithms at run time."""
        # The forward is compiled rather than the module, which would register every weight under a second name.
        self.compiled = torch.compile(self.unet.forward, dynamic=False)


def resolve_unet_shape(base_folder: Path | None, *, grid: tuple[int, ...], **sizes: Any) -> UNetShape:
    """Return the shape, from the recipe's sizes or `base_folder`; raise `UsageError` if it does not fit the samples."""
    if len(grid) != 2:
        raise UsageError("model.backbone: unet supports images and mel spectrograms only; use dit")
    config = read_unet_config(base_folder) if base_folder is not None else None
    shape = UNetShape(grid=(grid[0], grid[1]), config=config, **sizes)
    build_unet_config(shape)
    return shape


def build_unet_config(shape: UNetShape) -> dict[str, Any]:
    """Return the arguments of diffusers' class, with `_class_name`; raise `UsageError` if they do not fit the samples."""
    config = _build_own_config(shape) if shape.config is None else _adapt_folder_config(shape)
    num_halvings = len(config["block_out_channels"]) - 1
    indivisible = [side for side in shape.grid if side % 2**num_halvings]
    if indivisible:
        max_stages = min(_count_halvings(side) for side in shape.grid) + 1
        key = "stages" if shape.config is None else "from"
        raise UsageError(
            f"model.{key}: {num_halvings + 1} stages halve the sides {num_halvings} times, but {indivisible[0]} (of "
            f"{shape.grid[0]} x {shape.grid[1]}) is not divisible by {2**num_halvings}; use at most {max_stages} stages"
        )
    return config


def condition_vector_size(shape: UNetShape) -> int:
    """Return the size of the vector that is added to the time embedding."""
    config = build_unet_config(shape)
    return int(config.get("time_embedding_dim") or 4 * config["block_out_channels"][0])


def read_unet_config(folder: Path) -> str:
    """Return the configuration of a diffusers folder as JSON, for `UNetShape.config`."""
    path = find_unet_folder(folder)
    if path is None:
        raise UsageError(
            f"model.from: {folder} has no diffusers UNet; "
            f"expected config.json of a {UNCONDITIONAL_CLASS} or {CONDITIONAL_CLASS}"
        )
    return json.dumps(read_config(path), sort_keys=True)


def initial_value(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return an initial parameter as `initial_convolution` does, but zeros for the last convolution: the first prediction
    is then 0."""
    if name.endswith("conv_out.weight"):
        return np.zeros(shape, np.float32)
    # A stage has only a few residual layers; between stages a norm and a new width start another residual stream.
    return initial_convolution(name, shape, seed, residual_layers=4)


def _build_own_config(shape: UNetShape) -> dict[str, Any]:
    widths = [shape.hidden_size * min(2**i, MAX_WIDTH_FACTOR) for i in range(shape.stages)]
    has_attention = [
        i > 0 and (max(shape.grid) / 2**i <= MAX_ATTENTION_SIDE or i == shape.stages - 1) for i in range(shape.stages)
    ]
    attention_width = next((width for width, attends in zip(widths, has_attention, strict=True) if attends), widths[-1])
    if attention_width % shape.num_heads:
        raise UsageError(
            f"model.num_heads: {shape.num_heads} does not divide {attention_width}, "
            "the channels of the first stage with attention; use a divisor"
        )
    head_size = attention_width // shape.num_heads
    has_text = shape.context_size is not None
    prefix = "CrossAttn" if has_text else "Attn"
    down_blocks = [f"{prefix}DownBlock2D" if attends else "DownBlock2D" for attends in has_attention]
    up_blocks = [f"{prefix}UpBlock2D" if attends else "UpBlock2D" for attends in reversed(has_attention)]
    config: dict[str, Any] = {
        "_class_name": CONDITIONAL_CLASS if has_text else UNCONDITIONAL_CLASS,
        "in_channels": shape.channels,
        "out_channels": shape.channels,
        "block_out_channels": widths,
        "down_block_types": down_blocks,
        "up_block_types": up_blocks,
        "layers_per_block": shape.num_layers,
        "norm_num_groups": max(n for n in range(1, MAX_GROUPS + 1) if shape.hidden_size % n == 0),
        **_build_sample_options(shape),
    }
    if has_text:
        # diffusers reads this as the heads of each stage in a conditional UNet, and as the size of a head otherwise.
        num_heads = [max(1, width // head_size) for width in widths]
        return config | {"cross_attention_dim": shape.context_size, "attention_head_dim": num_heads}
    return config | {"attention_head_dim": head_size}


def _adapt_folder_config(shape: UNetShape) -> dict[str, Any]:
    """Return the configuration of a folder; raise `UsageError` if its model needs inputs that ours does not have."""
    assert shape.config is not None
    config: dict[str, Any] = json.loads(shape.config)
    has_text = config["_class_name"] == CONDITIONAL_CLASS
    unsupported = next((key for key in UNSUPPORTED_OPTIONS if config.get(key) is not None), None)
    channels = (config.get("in_channels", 4 if has_text else 3), config.get("out_channels", 4 if has_text else 3))
    if unsupported is not None:
        raise UsageError(
            f"model.from: its UNet has {unsupported} {config[unsupported]!r}, which is not supported; use another UNet"
        )
    if config.get("time_embedding_type", "positional") != "positional":
        raise UsageError(
            f"model.from: its UNet has time_embedding_type {config['time_embedding_type']}; only positional is supported; "
            "use another UNet"
        )
    if config.get("class_embed_type") not in (None, "identity"):
        raise UsageError(
            f"model.from: its UNet has class_embed_type {config['class_embed_type']!r}; only identity is supported; "
            "use another UNet"
        )
    if channels != (shape.channels, shape.channels):
        raise UsageError(
            f"model.from: its UNet takes {channels[0]} channels and gives {channels[1]}, but the samples have "
            f"{shape.channels}; use another UNet"
        )
    if has_text != (shape.context_size is not None):
        conditions = "text" if has_text else "none, class or vector"
        raise UsageError(f"model.condition: the UNet of model.from is a {config['_class_name']}; it takes {conditions}")
    text_size = config.get("cross_attention_dim", 1280)
    if has_text and text_size != shape.context_size:
        raise UsageError(
            f"model.text: its tokens have width {shape.context_size}, but the UNet of model.from takes {text_size}; "
            "use the text encoder that the UNet was trained with"
        )
    return config | _build_sample_options(shape)


def _build_sample_options(shape: UNetShape) -> dict[str, Any]:
    """Return the options that depend on the samples; diffusers' pipelines draw noise of this `sample_size`."""
    height, width = shape.grid
    size = height if height == width else [height, width]
    return {"sample_size": size, "class_embed_type": "identity" if shape.has_vector else None}


def _build_unet(config: dict[str, Any]) -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise EnvironmentProblem("model.backbone: unet needs diffusers; pip install 'bottega[hub]'") from error
    model_class = getattr(diffusers, config["_class_name"])
    options = {name: value for name, value in config.items() if not name.startswith("_")}
    parameters = inspect.signature(model_class.__init__).parameters
    unknown = [name for name in options if name not in parameters]
    if unknown:
        raise UsageError(
            f"model.from: its UNet has {unknown[0]}, which diffusers {diffusers.__version__} does not support; update diffusers"
        )
    return model_class(**options)


def _count_halvings(side: int) -> int:
    """Return how often a side is divisible by 2."""
    return (side & -side).bit_length() - 1
