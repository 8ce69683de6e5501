"""diffusers' UNet as a backbone, with our own sizes or the configuration of a folder.

The model is diffusers' own class, UNet2DModel or with text UNet2DConditionModel, so that exports open in diffusers.

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
from bottega.models.initial_conv import initial_convolution
from bottega.models.pipeline.component import read_class_name, read_config

PLAIN, WITH_TEXT = "UNet2DModel", "UNet2DConditionModel"
ATTENTION_SIDE = 32
"""Largest side of a stage with attention: 32 x 32 positions have 1 million pairs, 64 x 64 have 16 million."""
MAX_WIDTH_FACTOR = 4
"""Each stage has twice the channels of the previous one, up to this many times the first."""
MAX_GROUPS = 32
UNSUPPORTED = ("addition_embed_type", "encoder_hid_dim_type", "num_class_embeds", "time_cond_proj_dim")
"""Options of diffusers that need inputs other than time, one vector and text."""


class UNet(nn.Module):
    """Backbone with the interface of `DiT`; `unet` is diffusers' model."""

    def __init__(self, shape: UNetShape) -> None:
        super().__init__()
        self.shape = shape
        self.has_text = shape.context_size is not None
        if shape.config is None:
            self.unet: Any = _build(unet_config(shape))
        else:
            with attribute_errors_to("model.from"):
                self.unet = _build(unet_config(shape))
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
        run = self.compiled if self.compiled is not None and self.training else self.unet
        # Contiguous, because a channels-last view gives 1 x 1 kernels gradients in a layout that replicas cannot share.
        (output,) = run(x.movedim(-1, 1).contiguous(), time, **conditions, return_dict=False)
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

    def compile_whole(self, *, graphs: bool) -> None:
        """Compile the model; never as CUDA graphs, because convolutions choose their algorithms at run time."""
        # Its forward rather than the module, which would be a second name for every weight.
        self.compiled = torch.compile(self.unet.forward, dynamic=False)


def resolve_unet_shape(base_folder: Path | None, *, grid: tuple[int, ...], **sizes: Any) -> UNetShape:
    """Return the shape by the recipe's sizes or the folder it starts from; refuse one that does not fit the samples."""
    if len(grid) != 2:
        raise UsageError("model.backbone: unet supports images and mel spectrograms only; use dit")
    config = read_unet_config(base_folder) if base_folder is not None else None
    shape = UNetShape(grid=(grid[0], grid[1]), config=config, **sizes)
    unet_config(shape)
    return shape


def unet_config(shape: UNetShape) -> dict[str, Any]:
    """Return the arguments of diffusers' class, with `_class_name`; refuse those that do not fit the samples."""
    config = _own_config(shape) if shape.config is None else _folder_config(shape)
    halvings = len(config["block_out_channels"]) - 1
    wrong = [side for side in shape.grid if side % 2**halvings]
    if wrong:
        most = min(_halvings(side) for side in shape.grid) + 1
        key = "stages" if shape.config is None else "from"
        raise UsageError(
            f"model.{key}: {halvings + 1} stages halve the sides {halvings} times, but {wrong[0]} (of "
            f"{shape.grid[0]} x {shape.grid[1]}) is not divisible by {2**halvings}; use at most {most} stages"
        )
    return config


def condition_vector_size(shape: UNetShape) -> int:
    """Return the size of the vector that is added to the time embedding."""
    config = unet_config(shape)
    return int(config.get("time_embedding_dim") or 4 * config["block_out_channels"][0])


def find_unet_folder(folder: Path) -> Path | None:
    """Return the folder of a diffusers UNet: `folder` itself or its `unet/`; None where there is neither."""
    return next((path for path in (folder, folder / "unet") if read_class_name(path) in (PLAIN, WITH_TEXT)), None)


def read_unet_config(folder: Path) -> str:
    """Return the configuration of a diffusers folder as JSON, for `UNetShape.config`."""
    path = find_unet_folder(folder)
    if path is None:
        raise UsageError(
            f"model.from: {folder} has no diffusers UNet; expected config.json of a {PLAIN} or {WITH_TEXT}"
        )
    return json.dumps(read_config(path), sort_keys=True)


def initial_value(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return an initial parameter: zeros for the last convolution, so that the first prediction is 0."""
    if name.endswith("conv_out.weight"):
        return np.zeros(shape, np.float32)
    # A stage has only a few residual layers; between stages a norm and a new width start another residual stream.
    return initial_convolution(name, shape, seed, residual_layers=4)


def _own_config(shape: UNetShape) -> dict[str, Any]:
    widths = [shape.hidden_size * min(2**i, MAX_WIDTH_FACTOR) for i in range(shape.stages)]
    attends = [
        i > 0 and (max(shape.grid) / 2**i <= ATTENTION_SIDE or i == shape.stages - 1) for i in range(shape.stages)
    ]
    first = next((width for width, has in zip(widths, attends, strict=True) if has), widths[-1])
    if first % shape.num_heads:
        raise UsageError(
            f"model.num_heads: {shape.num_heads} does not divide {first}, the channels of the first stage with attention"
        )
    head = first // shape.num_heads
    text = shape.context_size is not None
    kind = "CrossAttn" if text else "Attn"
    down = [f"{kind}DownBlock2D" if has else "DownBlock2D" for has in attends]
    up = [f"{kind}UpBlock2D" if has else "UpBlock2D" for has in reversed(attends)]
    config: dict[str, Any] = {
        "_class_name": WITH_TEXT if text else PLAIN,
        "in_channels": shape.channels,
        "out_channels": shape.channels,
        "block_out_channels": widths,
        "down_block_types": down,
        "up_block_types": up,
        "layers_per_block": shape.num_layers,
        "norm_num_groups": max(n for n in range(1, MAX_GROUPS + 1) if shape.hidden_size % n == 0),
        **_sample_options(shape),
    }
    if text:
        # diffusers reads this as the heads of each stage in a conditional UNet, and as the size of a head otherwise.
        heads = [max(1, width // head) for width in widths]
        return config | {"cross_attention_dim": shape.context_size, "attention_head_dim": heads}
    return config | {"attention_head_dim": head}


def _folder_config(shape: UNetShape) -> dict[str, Any]:
    """Return the configuration of a folder; raises `UsageError` if its model needs other inputs than ours."""
    assert shape.config is not None
    config: dict[str, Any] = json.loads(shape.config)
    text = config["_class_name"] == WITH_TEXT
    unsupported = next((key for key in UNSUPPORTED if config.get(key) is not None), None)
    channels = (config.get("in_channels", 4 if text else 3), config.get("out_channels", 4 if text else 3))
    if unsupported is not None:
        raise UsageError(f"model.from: that UNet has {unsupported} {config[unsupported]!r}, which is not supported")
    if config.get("time_embedding_type", "positional") != "positional":
        raise UsageError(
            f"model.from: that UNet has time_embedding_type {config['time_embedding_type']}, not supported"
        )
    if config.get("class_embed_type") not in (None, "identity"):
        raise UsageError(f"model.from: that UNet has class_embed_type {config['class_embed_type']!r}, not supported")
    if channels != (shape.channels, shape.channels):
        raise UsageError(
            f"model.from: that UNet takes {channels[0]} channels and gives {channels[1]}, but the samples have {shape.channels}"
        )
    if text != (shape.context_size is not None):
        takes = "text" if text else "none, class or vector"
        raise UsageError(f"model.condition: the UNet of model.from is a {config['_class_name']}; it takes {takes}")
    width = config.get("cross_attention_dim", 1280)
    if text and width != shape.context_size:
        raise UsageError(
            f"model.text: its tokens have width {shape.context_size}; the UNet of model.from takes {width}"
        )
    return config | _sample_options(shape)


def _sample_options(shape: UNetShape) -> dict[str, Any]:
    """Return the options that depend on the samples; diffusers' pipelines draw noise of this `sample_size`."""
    height, width = shape.grid
    size = height if height == width else [height, width]
    return {"sample_size": size, "class_embed_type": "identity" if shape.has_vector else None}


def _build(config: dict[str, Any]) -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise EnvironmentProblem("model.backbone: unet needs diffusers; pip install 'bottega[hub]'") from error
    kind = getattr(diffusers, config["_class_name"])
    options = {name: value for name, value in config.items() if not name.startswith("_")}
    parameters = inspect.signature(kind.__init__).parameters
    unknown = [name for name in options if name not in parameters]
    if unknown:
        raise UsageError(
            f"model.from: that UNet has {unknown[0]}, which diffusers {diffusers.__version__} does not support; update diffusers"
        )
    return kind(**options)


def _halvings(side: int) -> int:
    """Return how often a side is divisible by 2."""
    return (side & -side).bit_length() - 1
