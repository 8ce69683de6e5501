"""What must be known of a diffusers pipeline before it is loaded: its parts, their widths, and how it was trained.

Three families are read: Stable Diffusion 1 and 2 (`sd`: a UNet and one CLIP), SDXL (a UNet, two CLIPs and the size of the
picture), and Stable Diffusion 3 (`flow`: a transformer, two CLIPs and a T5 that may be absent).
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
    INDEX,
    KEY,
    T5,
    TRANSFORMER,
    PipelineComponents,
    read_pipeline_components,
    resolve_pipeline,
)
from bottega.models.pipeline.schedule import Objective, Schedule, is_flow_scheduler, read_schedule

__all__ = ["INDEX", "T5_TOKENS", "PipelineMetadata", "read_pipeline_metadata", "resolve_pipeline"]

T5_TOKENS = 256
"""So many diffusers asks a T5 for, or fills with zeros where there is none."""
SIZE_NUMBERS = 6
"""What SDXL is told of a picture: its size, where it was cut, and the size it is drawn in."""
UNSUPPORTED = ("encoder_hid_dim_type", "num_class_embeds", "class_embed_type", "time_cond_proj_dim")
"""What asks for more inputs than time, text and a pooled text."""
UNBOUNDED = 1 << 24
"""Tokenizers without a longest text say so with a number of this order."""

Kind = Literal["sd", "sdxl", "flow"]


class PipelineMetadata(BaseModel):
    """Plain values alone. `objective`, `schedule` and `shift` are those of the path between data and noise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    folder: str
    denoiser: str
    """Folder of the UNet or transformer; the next three are folders too."""
    encoders: tuple[str, ...]
    tokenizers: tuple[str, ...]
    vae: str
    lengths: tuple[int, ...]
    """How many tokens each encoder reads."""
    vocab_sizes: tuple[int, ...]
    num_tokens: int
    """Of an encoded text, T."""
    text_size: int
    """Width of each of them, W."""
    pooled_size: int | None
    """Width of what is said of a text as a whole, beside its tokens; None where nothing is."""
    objective: Objective
    schedule: Schedule
    shift: float
    scale: float
    """Latents are (what the autoencoder says - latent_shift) * scale."""
    latent_shift: float
    downsample: int
    latent_channels: int
    image_size: int
    """Side in pixels that it was made for."""
    side_step: int
    """Sides are multiples of so many pixels."""
    max_side: int | None
    zero_unconditional: bool
    """Whether no text is zeros rather than the encoding of an empty one, where nothing is asked to be avoided."""

    def check_side(self, side: int, *, key: str = "data.image_size") -> None:
        """Refuse pictures that the model cannot draw."""
        if side % self.side_step:
            raise UsageError(f"{key}: {side} is not a multiple of {self.side_step}, which {self.folder} needs")
        if self.max_side is not None and side > self.max_side:
            raise UsageError(f"{key}: {side} is more than the {self.max_side} that {self.folder} can draw")


class _Texts(NamedTuple):
    """What the encoders of a pipeline give."""

    widths: tuple[int, ...]
    projections: tuple[int, ...]
    lengths: tuple[int, ...]
    vocab_sizes: tuple[int, ...]


def read_pipeline_metadata(folder: Path | str) -> PipelineMetadata:
    """Of a local folder, from its configurations alone; refused where parts do not fit each other or could run code."""
    parts = read_pipeline_components(Path(folder))
    try:
        return _facts(parts)
    except (TypeError, ValueError, AttributeError, LookupError) as error:  # words in place of numbers, and the like
        raise UsageError(
            f"{KEY}: a configuration in {parts.folder} holds what no pipeline has ({first_line(error)}); save or download it "
            "again"
        ) from error


def _facts(parts: PipelineComponents) -> PipelineMetadata:
    config, texts, scheduler = read_config(parts.denoiser), _read_texts(parts), parts.folder / "scheduler"
    path = read_schedule(scheduler / "scheduler_config.json")
    vae = _read_vae(parts, config)
    if parts.denoiser_class == TRANSFORMER:
        if not is_flow_scheduler(scheduler / "scheduler_config.json"):
            raise UsageError(f"{scheduler}: {TRANSFORMER} predicts a flow, and this scheduler is of {path.objective}")
        own = _flow(parts, config, texts, vae["downsample"])
    else:
        own = _unet(parts, config, texts, vae["downsample"])
    return PipelineMetadata(
        folder=str(parts.folder),
        denoiser=str(parts.denoiser),
        encoders=tuple(map(str, parts.encoders)),
        tokenizers=tuple(map(str, parts.tokenizers)),
        vae=str(parts.vae),
        vocab_sizes=texts.vocab_sizes,
        **path._asdict(),
        **vae,
        **own,
    )


def _unet(parts: PipelineComponents, config: dict[str, Any], texts: _Texts, downsample: int) -> dict[str, Any]:
    """Of Stable Diffusion 1, 2 and XL."""
    is_xl, where = len(parts.encoders) == 2, parts.denoiser
    given = next((key for key in UNSUPPORTED if config.get(key) is not None), None)
    if given is not None:
        raise UsageError(f"{KEY}: {where} has {given} {config[given]!r}, which is not supported")
    added = config.get("addition_embed_type")
    if added != ("text_time" if is_xl else None):
        raise UsageError(f"{KEY}: {where} has addition_embed_type {added!r}, not supported with {len(parts.encoders)}")
    taken = config.get("cross_attention_dim", 1280)
    widths = set(taken) if isinstance(taken, list) else {taken}
    text_size = sum(texts.widths)
    if widths != {text_size}:
        _misfit(f"{where} takes text of width {_listed(widths)} (cross_attention_dim)", parts, text_size)
    pooled = texts.projections[-1] if is_xl else None
    if pooled is not None:
        _check_sizes(where, config, pooled)
        if len(set(texts.lengths)) > 1:
            raise UsageError(
                f"{KEY}: {parts.folder}: its encoders read {_listed(texts.lengths)} tokens, not as many each"
            )
    side = config.get("sample_size")
    return {
        "kind": "sdxl" if is_xl else "sd",
        "lengths": texts.lengths,
        "num_tokens": texts.lengths[0],
        "text_size": text_size,
        "pooled_size": pooled,
        "image_size": downsample * (side[0] if isinstance(side, list) else side or 64),
        "side_step": downsample,
        "max_side": None,
        "zero_unconditional": is_xl and bool(parts.model_index.get("force_zeros_for_empty_prompt", True)),
    }


def _flow(parts: PipelineComponents, config: dict[str, Any], texts: _Texts, downsample: int) -> dict[str, Any]:
    """Of Stable Diffusion 3: both CLIPs side by side, filled up with zeros to the width of a T5, which comes after them."""
    width, pooled = config.get("joint_attention_dim", 4096), config.get("pooled_projection_dim", 2048)
    has_t5, side_by_side = len(parts.encoders) == 3, sum(texts.widths[:2])
    if has_t5 and texts.widths[2] != width:
        _misfit(f"{parts.denoiser} takes text of width {width} (joint_attention_dim)", parts, texts.widths[2])
    if side_by_side > width:
        _misfit(f"{parts.denoiser} takes text of width {width} (joint_attention_dim)", parts, side_by_side)
    if sum(texts.projections[:2]) != pooled:
        said = f"{parts.denoiser} takes a pooled text of width {pooled} (pooled_projection_dim)"
        _misfit(said, parts, sum(texts.projections[:2]))
    if texts.lengths[0] != texts.lengths[1]:
        raise UsageError(f"{KEY}: {parts.folder}: its CLIPs read {_listed(texts.lengths[:2])} tokens, not as many each")
    patch = config.get("patch_size", 2)
    return {
        "kind": "flow",
        "lengths": texts.lengths,
        "num_tokens": texts.lengths[0] + (texts.lengths[2] if has_t5 else T5_TOKENS),
        "text_size": width,
        "pooled_size": pooled,
        "image_size": downsample * config.get("sample_size", 128),
        "side_step": downsample * patch,
        "max_side": downsample * patch * config.get("pos_embed_max_size", 96),
        "zero_unconditional": False,
    }


def _check_sizes(where: Path, config: dict[str, Any], pooled: int) -> None:
    """SDXL's pooled text and the numbers of a picture's size are embedded side by side."""
    each, given = config.get("addition_time_embed_dim"), config.get("projection_class_embeddings_input_dim")
    if each is None or given != pooled + SIZE_NUMBERS * each:
        raise UsageError(
            f"{KEY}: {where} takes {given} numbers beside the text (projection_class_embeddings_input_dim), and its second "
            f"encoder gives {pooled} with {SIZE_NUMBERS} of size times {each}; they do not belong together"
        )


def _read_vae(parts: PipelineComponents, denoiser: dict[str, Any]) -> dict[str, Any]:
    config = {**VAE_DEFAULTS, **read_config(parts.vae)}
    channels, shift = config["latent_channels"], config["shift_factor"] or 0.0
    if config["latents_mean"] is not None or config["latents_std"] is not None:
        raise UsageError(f"{KEY}: {parts.vae} has latents_mean, which is not supported; give one with a scaling_factor")
    if shift and parts.denoiser_class != TRANSFORMER:
        raise UsageError(f"{KEY}: {parts.vae} has shift_factor {shift}, which pipelines with a UNet do not look at")
    taken = denoiser.get("in_channels", 16 if parts.denoiser_class == TRANSFORMER else 4)
    given = (taken, denoiser.get("out_channels") or taken)
    if given != (channels, channels):
        raise UsageError(
            f"{KEY}: {parts.denoiser} takes {given[0]} channels and gives {given[1]}, its autoencoder has {channels}; "
            "give one that draws from text alone"
        )
    downsample = 2 ** (len(config["block_out_channels"]) - 1)
    return {
        "scale": config["scaling_factor"],
        "latent_shift": shift,
        "downsample": downsample,
        "latent_channels": channels,
    }


def _read_texts(parts: PipelineComponents) -> _Texts:
    found = []
    for encoder, words, kind in zip(parts.encoders, parts.tokenizers, parts.encoder_classes, strict=True):
        config = load_transformers_config(encoder, key=KEY, what="text encoder")
        if getattr(config, "use_attention_mask", None):
            raise UsageError(f"{KEY}: {encoder} has use_attention_mask, which is not supported")
        most = T5_TOKENS if kind == T5 else config.max_position_embeddings
        file = words / "tokenizer_config.json"
        said = read_json_object(file).get("model_max_length") if file.is_file() else None
        length = min(most, int(said)) if isinstance(said, int | float) and 0 < said < UNBOUNDED else most
        projection = getattr(config, "projection_dim", 0) or 0
        found.append((config.hidden_size, projection, length, config.vocab_size))
    widths, projections, lengths, sizes = zip(*found, strict=True)
    return _Texts(widths, projections, lengths, sizes)


def _misfit(takes: str, parts: PipelineComponents, given: int) -> None:
    names = " and ".join(place.name for place in parts.encoders)
    raise UsageError(f"{KEY}: {takes}, and {names} beside it gives {given}; they do not belong together")


def _listed(numbers: Any) -> str:
    return " and ".join(map(str, numbers))
