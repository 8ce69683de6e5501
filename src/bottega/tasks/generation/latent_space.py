"""The frozen autoencoder in whose latents a generator works: where it lies, whether it fits, and what it makes of the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from pydantic import BaseModel, ConfigDict

from bottega.config.recipe import Recipe
from bottega.core.errors import UsageError
from bottega.data.audio.mel import FILE as MEL
from bottega.data.audio.mel import MelProcessor
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources import latents as kept
from bottega.data.sources.samples import open_media_source
from bottega.data.sources.source import Source
from bottega.data.tables.shards import Table
from bottega.models.autoencoder.config import AutoencoderShape
from bottega.models.autoencoder.layout import read_autoencoder_shape
from bottega.models.build import build_model
from bottega.models.folders.resolve import CONFIG, find_component_folder
from bottega.tasks import dependencies
from bottega.tasks.frozen_models import check_same_model, find_frozen_model, hash_model_folder
from bottega.tasks.generation.config import AudioRecipe
from bottega.tasks.generation.latents import Latents, encode_moments

WHAT = "autoencoder"
DIMENSIONS = {"image": (2,), "audio": (1, 2), "video": (3,)}


class LatentMetadata(BaseModel):
    """What a run keeps of its autoencoder, beside the shape of what is generated."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    content: str
    """Its hash: a generator understands no other."""
    scale: float
    shift: float
    sample: tuple[int, ...]
    """Sides and channels of the data."""

    def build_latents(self) -> Latents:
        return Latents(folder=self.folder, scale=self.scale, shift=self.shift)

    def check(self, before: LatentMetadata | None) -> None:
        """A run goes on in the latents it began with, or not at all."""
        was, content = (before.folder, before.content) if before is not None else ("none", None)
        check_same_model(WHAT, now=self.content, before=content, name=self.folder, previous=was)

    def relocate(self, recipe: Recipe, processor: Path) -> LatentMetadata:
        """Of a finished run: the folder may lie where the recipe says, where it was, or beside a run that was moved."""
        known, runs = Path(self.folder), processor.absolute().parent.parent
        places = [
            lambda: resolve_vae_folder(recipe),
            lambda: known,
            lambda: dependencies.dependencies_folder(runs) / known.parent.name / known.name,
        ]
        part_of = processor.parent if str(recipe.model.vae).startswith(dependencies.PREFIX) else None  # type: ignore[attr-defined]
        found = find_frozen_model(WHAT, self.content, places, recorded=self.folder, owner=part_of)
        return self.model_copy(update={"folder": str(found)})


@final
@dataclass(frozen=True)
class LatentSpace:
    """An autoencoder that is there: its folder, and what its config says."""

    folder: Path
    shape: AutoencoderShape

    def metadata(self, grid: tuple[int, ...], channels: int) -> LatentMetadata:
        return LatentMetadata(
            folder=str(self.folder),
            content=hash_model_folder(self.folder),
            scale=self.shape.scaling_factor,
            shift=self.shape.shift_factor,
            sample=(*grid, channels),
        )

    def latent_sides(self, grid: tuple[int, ...], channels: int) -> tuple[tuple[int, ...], int]:
        """(grid, channels) of the latents of such data."""
        if self.shape.channels != channels:
            hint = f"set data.channels={self.shape.channels}" if self.shape.channels in (1, 3) else "train one for them"
            raise UsageError(
                f"model.vae: {self.folder} reads {self.shape.channels} channels, and the data have {channels}; {hint}"
            )
        return self.shape.latent_grid(grid), self.shape.latent_channels


def open_latent_space(recipe: Any, medium: Literal["image", "audio", "video"]) -> LatentSpace | None:
    """That of a recipe, or None where it generates plain values."""
    if recipe.model.vae is None:
        return None
    folder = resolve_vae_folder(recipe)
    shape, is_sound = read_autoencoder_shape(folder), (folder / MEL).is_file()
    if is_sound != (medium == "audio") or shape.dims not in DIMENSIONS[medium]:
        made_for = "sound" if is_sound else {1: "one axis", 2: "images", 3: "video"}[shape.dims]
        raise UsageError(f"model.vae: {folder} is an autoencoder of {made_for}, and the task is {medium}")
    if medium == "audio" and recipe.model.axes != shape.dims:
        raise UsageError(
            f"model.axes: {recipe.model.axes}, and the latents of {folder} have {shape.dims}; "
            f"set model.axes={shape.dims}"
        )
    if medium != "audio" and recipe.data.normalise != "symmetric":
        raise UsageError(
            f"data.normalise: {recipe.data.normalise}, and an autoencoder reads values from -1 to 1; leave it out"
        )
    return LatentSpace(folder, shape)


def resolve_vae_folder(recipe: Any) -> Path:
    """Where `model.vae` points: a part of the recipe, a run, a pipeline of diffusers, or the autoencoder itself."""
    return resolve_autoencoder_folder(recipe, recipe.model.vae, key="model.vae")


def resolve_autoencoder_folder(recipe: Any, name: str, *, key: str) -> Path:
    """The folder with the autoencoder's own config.json, for one that a person would name."""
    absent = "is no folder; name a run, or one with an AutoencoderKL of diffusers"
    folder = dependencies.resolve_model_reference(recipe, name, key=key, missing_message=absent).path
    found = find_component_folder(folder, "vae")
    if not (found / CONFIG).is_file():
        raise UsageError(f"{key}: {folder} has no {CONFIG}; name a run, or a folder with an AutoencoderKL of diffusers")
    return found.absolute()


def load_mel_processor(
    folder: Path, recipe: AudioRecipe, prepared: PreparedData, *, low: float = 0.0, high: float | None = None
) -> MelProcessor:
    """How an autoencoder of sound sees it, which is how its latents are made; refused for sounds of another kind."""
    processor, data = MelProcessor.load(folder), recipe.data
    asked = {"sample_rate": int(prepared.metadata["sample_rate"]), "low": low, "high": high}
    asked |= {"fft_size": data.fft_size, "hop_size": data.hop_size, "num_mels": data.num_mels}
    for key, value in asked.items():
        known = getattr(processor.mel, key)
        if known != value:
            owner = "model.vocoder" if key in ("low", "high") else f"data.{key}"
            raise UsageError(f"{owner}: {value}, and model.vae ({folder}) was trained with {key} {known}")
    rows: list[Any] = [
        open_media_source(recipe, prepared, name, is_training=False) for name in prepared.training_tables
    ]
    longest, rate = max(one.num_samples for one in rows), processor.mel.sample_rate
    if longest > processor.num_samples:
        seconds = processor.num_samples / rate
        raise UsageError(
            f"data.seconds: sounds last up to {longest / rate:g} s, and model.vae ({folder}) knows {seconds:g} s; "
            f"set data.seconds={seconds:g}"
        )
    return processor


def compute_latents(
    metadata: LatentMetadata,
    shape: tuple[int, ...],
    tables: dict[str, tuple[Any, Source]],
    *,
    key: str,
    device: Any,
    progress: Callable[[str, int, int], None],
) -> dict[str, Table]:
    """The latents of each table, whose samples come as they are and as the model sees them; `shape` is that of a latent."""
    import torch

    opened: list[Any] = []

    def encode(values: np.ndarray) -> np.ndarray:
        if not opened:  # what is in the cache already needs no autoencoder
            opened.append(build_model(metadata.build_latents().spec(), 0).to(device).eval())
        return encode_moments(opened[0], torch.from_numpy(values).to(device)).cpu().numpy()

    for rows, _ in tables.values():
        kept.check_deterministic(rows)
    return {
        name: kept.compute_latents(
            samples, key, content=metadata.content, shape=shape, encode=encode, progress=progress
        )
        for name, (_, samples) in tables.items()
    }
