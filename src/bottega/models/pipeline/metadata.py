"""Metadata of a diffusers pipeline, read from its configurations without loading weights or importing diffusers.

Three families are supported: Stable Diffusion 1 and 2 (`sd`: a UNet and one CLIP), SDXL (a UNet, two CLIPs and the image
size as a condition), and Stable Diffusion 3 (`flow`: a transformer, two CLIPs and an optional T5). Components that do not
fit each other are refused here by name; diffusers would load them and fail in the first step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from bottega.core.errors import UsageError, first_line
from bottega.models.autoencoder.layout import DEFAULTS as VAE_DEFAULTS
from bottega.models.folders.json_object import read_json_object
from bottega.models.folders.untrusted import load_transformers_config
from bottega.models.pipeline.component import read_config
from bottega.models.pipeline.model_index import (
    KEY,
    MODEL_INDEX,
    T5,
    TRANSFORMER,
    PipelineComponents,
    read_pipeline_components,
    resolve_pipeline,
)
from bottega.models.pipeline.schedule import Objective, Schedule, is_flow_scheduler, read_schedule

__all__ = ["MODEL_INDEX", "T5_TOKENS", "PipelineMetadata", "read_pipeline_metadata", "resolve_pipeline"]

T5_TOKENS = 256
"""Length of the T5 sequence in diffusers' pipelines; zeros of that length stand for an absent T5."""
NUM_SIZE_IDS = 6
"""Number of values in SDXL's size condition: original size, crop position and target size, two values each."""
UNSUPPORTED_KEYS = ("encoder_hid_dim_type", "num_class_embeds", "class_embed_type", "time_cond_proj_dim")
"""Configuration keys of UNets with inputs other than time, text and a pooled text embedding."""
MIN_UNBOUNDED_LENGTH = 1 << 24
"""A `model_max_length` of at least this value means that a tokenizer has no limit."""

Kind = Literal["sd", "sdxl", "flow"]


class PipelineMetadata(BaseModel):
    """Dimensions, component folders and noise schedule of a pipeline. Field names are part of saved files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    folder: str
    denoiser: str
    """Folder of the UNet or transformer; `encoders`, `tokenizers` and `vae` are folders too."""
    encoders: tuple[str, ...]
    tokenizers: tuple[str, ...]
    vae: str
    lengths: tuple[int, ...]
    """Number of tokens of each text encoder."""
    vocab_sizes: tuple[int, ...]
    num_tokens: int
    """Number of tokens of an encoded text, T."""
    text_size: int
    """Width of an encoded token, D."""
    pooled_size: int | None
    """Width of the pooled text embedding; None if the model does not take one."""
    objective: Objective
    schedule: Schedule
    shift: float
    """Timestep shift of a flow; 1 for other objectives."""
    scale: float
    """Latents are (the VAE's output - latent_shift) * scale."""
    latent_shift: float
    downsample: int
    latent_channels: int
    image_size: int
    """Side in pixels of the training images."""
    side_step: int
    """Image sides must be multiples of this number of pixels."""
    max_side: int | None
    zero_unconditional: bool
    """Whether, without a negative prompt, the unconditional text embedding is zeros, not the embedding of the empty text."""

    def check_side(self, side: int, *, key: str = "data.image_size") -> None:
        """Raise UsageError if the model cannot generate images of this side."""
        if side % self.side_step:
            raise UsageError(
                f"{key}: {side} is not a multiple of {self.side_step}, which {self.folder} needs; "
                f"try {max(1, side // self.side_step) * self.side_step}"
            )
        if self.max_side is not None and side > self.max_side:
            raise UsageError(
                f"{key}: {side} is more than {self.max_side}, the largest image side that {self.folder} supports"
            )


class _TextEncoders(NamedTuple):
    """Dimensions of a pipeline's text encoders."""

    widths: tuple[int, ...]
    projections: tuple[int, ...]
    lengths: tuple[int, ...]
    vocab_sizes: tuple[int, ...]


def read_pipeline_metadata(folder: Path | str) -> PipelineMetadata:
    """Return the metadata of a local pipeline; refuse components that do not fit each other or could run code."""
    components = read_pipeline_components(Path(folder))
    try:
        return _read_metadata(components)
    except (TypeError, ValueError, AttributeError, LookupError) as error:  # text in place of numbers, and the like
        raise UsageError(
            f"{KEY}: a configuration in {components.folder} has an invalid value ({first_line(error)}); save or download the "
            "pipeline again"
        ) from error


def _read_metadata(components: PipelineComponents) -> PipelineMetadata:
    config, text_encoders, scheduler = (
        read_config(components.denoiser),
        _read_text_encoders(components),
        components.folder / "scheduler",
    )
    schedule = read_schedule(scheduler / "scheduler_config.json")
    vae_fields = _read_vae_fields(components, config)
    if components.denoiser_class == TRANSFORMER:
        if not is_flow_scheduler(scheduler / "scheduler_config.json"):
            raise UsageError(
                f"{scheduler}: {TRANSFORMER} needs a flow-matching scheduler, but this one predicts {schedule.objective}; "
                "use a complete copy of one pipeline"
            )
        family_fields = _read_flow_fields(components, config, text_encoders, vae_fields["downsample"])
    else:
        family_fields = _read_unet_fields(components, config, text_encoders, vae_fields["downsample"])
    return PipelineMetadata(
        folder=str(components.folder),
        denoiser=str(components.denoiser),
        encoders=tuple(map(str, components.encoders)),
        tokenizers=tuple(map(str, components.tokenizers)),
        vae=str(components.vae),
        vocab_sizes=text_encoders.vocab_sizes,
        **schedule._asdict(),
        **vae_fields,
        **family_fields,
    )


def _read_unet_fields(
    components: PipelineComponents, config: dict[str, Any], text_encoders: _TextEncoders, downsample: int
) -> dict[str, Any]:
    """Return the fields specific to Stable Diffusion 1, 2 and XL."""
    is_xl, unet = len(components.encoders) == 2, components.denoiser
    unsupported_key = next((key for key in UNSUPPORTED_KEYS if config.get(key) is not None), None)
    if unsupported_key is not None:
        raise UsageError(
            f"{KEY}: {unet} has {unsupported_key} {config[unsupported_key]!r}, which is not supported; use another pipeline"
        )
    addition = config.get("addition_embed_type")
    if addition != ("text_time" if is_xl else None):
        raise UsageError(
            f"{KEY}: {unet} has addition_embed_type {addition!r}, which is not supported with {len(components.encoders)} text "
            "encoders; use a complete copy of one pipeline"
        )
    cross_attention_dim = config.get("cross_attention_dim", 1280)
    widths = set(cross_attention_dim) if isinstance(cross_attention_dim, list) else {cross_attention_dim}
    text_size = sum(text_encoders.widths)
    if widths != {text_size}:
        _raise_mismatch(
            f"{unet} takes text of width {_join_numbers(widths)} (cross_attention_dim)", components, text_size
        )
    pooled_size = text_encoders.projections[-1] if is_xl else None
    if pooled_size is not None:
        _check_size_condition(unet, config, pooled_size)
        if len(set(text_encoders.lengths)) > 1:
            raise UsageError(
                f"{KEY}: the text encoders of {components.folder} read {_join_numbers(text_encoders.lengths)} tokens; "
                "the lengths must be equal"
            )
    side = config.get("sample_size")
    return {
        "kind": "sdxl" if is_xl else "sd",
        "lengths": text_encoders.lengths,
        "num_tokens": text_encoders.lengths[0],
        "text_size": text_size,
        "pooled_size": pooled_size,
        "image_size": downsample * (side[0] if isinstance(side, list) else side or 64),
        "side_step": downsample,
        "max_side": None,
        "zero_unconditional": is_xl and bool(components.model_index.get("force_zeros_for_empty_prompt", True)),
    }


def _read_flow_fields(
    components: PipelineComponents, config: dict[str, Any], text_encoders: _TextEncoders, downsample: int
) -> dict[str, Any]:
    """Return the fields specific to Stable Diffusion 3.

    The CLIPs' tokens are concatenated by width, padded with zeros to the width of the T5, whose tokens follow.
    """
    width, pooled_size = config.get("joint_attention_dim", 4096), config.get("pooled_projection_dim", 2048)
    has_t5, clip_width = len(components.encoders) == 3, sum(text_encoders.widths[:2])
    if has_t5 and text_encoders.widths[2] != width:
        _raise_mismatch(
            f"{components.denoiser} takes text of width {width} (joint_attention_dim)",
            components,
            text_encoders.widths[2],
        )
    if clip_width > width:
        _raise_mismatch(
            f"{components.denoiser} takes text of width {width} (joint_attention_dim)", components, clip_width
        )
    if sum(text_encoders.projections[:2]) != pooled_size:
        requirement = f"{components.denoiser} takes a pooled text of width {pooled_size} (pooled_projection_dim)"
        _raise_mismatch(requirement, components, sum(text_encoders.projections[:2]))
    if text_encoders.lengths[0] != text_encoders.lengths[1]:
        raise UsageError(
            f"{KEY}: the CLIPs of {components.folder} read {_join_numbers(text_encoders.lengths[:2])} tokens; "
            "the lengths must be equal"
        )
    patch = config.get("patch_size", 2)
    return {
        "kind": "flow",
        "lengths": text_encoders.lengths,
        "num_tokens": text_encoders.lengths[0] + (text_encoders.lengths[2] if has_t5 else T5_TOKENS),
        "text_size": width,
        "pooled_size": pooled_size,
        "image_size": downsample * config.get("sample_size", 128),
        "side_step": downsample * patch,
        "max_side": downsample * patch * config.get("pos_embed_max_size", 96),
        "zero_unconditional": False,
    }


def _check_size_condition(unet: Path, config: dict[str, Any], pooled_size: int) -> None:
    """Check the width of SDXL's added condition: the pooled text and the embedded size numbers, concatenated."""
    width, expected = config.get("addition_time_embed_dim"), config.get("projection_class_embeddings_input_dim")
    if width is None or expected != pooled_size + NUM_SIZE_IDS * width:
        raise UsageError(
            f"{KEY}: {unet} has projection_class_embeddings_input_dim {expected}, but the pooled output of its second text "
            f"encoder ({pooled_size}) and the embedded image size ({NUM_SIZE_IDS} x {width}) do not add up to it; use a complete "
            "copy of one pipeline"
        )


def _read_vae_fields(components: PipelineComponents, denoiser_config: dict[str, Any]) -> dict[str, Any]:
    config = {**VAE_DEFAULTS, **read_config(components.vae)}
    channels, shift = config["latent_channels"], config["shift_factor"] or 0.0
    if config["latents_mean"] is not None or config["latents_std"] is not None:
        raise UsageError(
            f"{KEY}: {components.vae} has latents_mean, which is not supported; use a VAE with a scaling_factor"
        )
    if shift and components.denoiser_class != TRANSFORMER:
        raise UsageError(
            f"{KEY}: {components.vae} has shift_factor {shift}, which pipelines with a UNet ignore; "
            "use a complete copy of one pipeline"
        )
    in_channels = denoiser_config.get("in_channels", 16 if components.denoiser_class == TRANSFORMER else 4)
    out_channels = denoiser_config.get("out_channels") or in_channels
    if (in_channels, out_channels) != (channels, channels):
        raise UsageError(
            f"{KEY}: {components.denoiser} takes {in_channels} channels and gives {out_channels}, "
            f"but its autoencoder has {channels}; use a text-to-image pipeline"
        )
    downsample = 2 ** (len(config["block_out_channels"]) - 1)
    return {
        "scale": config["scaling_factor"],
        "latent_shift": shift,
        "downsample": downsample,
        "latent_channels": channels,
    }


def _read_text_encoders(components: PipelineComponents) -> _TextEncoders:
    rows = []
    for encoder, tokenizer, encoder_class in zip(
        components.encoders, components.tokenizers, components.encoder_classes, strict=True
    ):
        config = load_transformers_config(encoder, key=KEY, description="text encoder")
        if getattr(config, "use_attention_mask", None):
            raise UsageError(f"{KEY}: {encoder} has use_attention_mask, which is not supported; use another pipeline")
        limit = T5_TOKENS if encoder_class == T5 else config.max_position_embeddings
        file = tokenizer / "tokenizer_config.json"
        length = read_json_object(file).get("model_max_length") if file.is_file() else None
        length = (
            min(limit, int(length)) if isinstance(length, int | float) and 0 < length < MIN_UNBOUNDED_LENGTH else limit
        )
        projection = getattr(config, "projection_dim", 0) or 0
        rows.append((config.hidden_size, projection, length, config.vocab_size))
    widths, projections, lengths, vocab_sizes = zip(*rows, strict=True)
    return _TextEncoders(widths, projections, lengths, vocab_sizes)


def _raise_mismatch(requirement: str, components: PipelineComponents, width: int) -> None:
    """Raise the error for text encoders of this width, where `requirement` says which width the denoiser takes."""
    names = " and ".join(path.name for path in components.encoders)
    raise UsageError(
        f"{KEY}: {requirement}, but the text encoders of this pipeline ({names}) have width {width}; "
        "use a complete copy of one pipeline"
    )


def _join_numbers(numbers: Any) -> str:
    return " and ".join(map(str, numbers))
