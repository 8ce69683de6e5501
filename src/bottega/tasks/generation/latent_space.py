"""The frozen autoencoder of a latent generator: how it is found and checked, and the latents of the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
from pydantic import BaseModel, ConfigDict

from bottega.config.recipe import Recipe
from bottega.core.errors import UsageError
from bottega.core.model_spec import resolve_reference
from bottega.data.audio.mel import MEL_FILE as MEL
from bottega.data.audio.mel import MelProcessor
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources import latents as latent_cache
from bottega.data.sources.samples import open_media_source
from bottega.data.sources.source import Source
from bottega.data.tables.shards import Table
from bottega.models.autoencoder.config import AutoencoderShape
from bottega.models.autoencoder.layout import read_autoencoder_shape
from bottega.models.folders.resolve import CONFIG, find_component_folder
from bottega.tasks import dependencies
from bottega.tasks.frozen_models import check_same_model, find_frozen_model, hash_model_folder
from bottega.tasks.generation.config import AudioRecipe
from bottega.tasks.generation.latents import Latents

KIND = "autoencoder"
OPEN_ENCODER = "bottega.tasks.generation.{framework}_latents:open_encoder"
MEDIUM_DIMS = {"image": (2,), "audio": (1, 2), "video": (3,)}


class LatentMetadata(BaseModel):
    """The autoencoder of a run: its folder, hash and latent scale; saved with the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    content: str
    """Hash of its files: a generator works only with the autoencoder it was trained with."""
    scale: float
    shift: float
    sample: tuple[int, ...]
    """Sides and channels of the data."""

    def build_latents(self) -> Latents:
        """Return the latents as a field of the task."""
        return Latents(folder=self.folder, scale=self.scale, shift=self.shift)

    def check_recorded(self, recorded: LatentMetadata | None) -> None:
        """Raise CheckpointError if a resumed run started with another autoencoder."""
        folder, content = (recorded.folder, recorded.content) if recorded is not None else ("none", None)
        check_same_model(KIND, current_hash=self.content, recorded_hash=content, name=self.folder, recorded=folder)

    def relocate(self, recipe: Recipe, processor: Path) -> LatentMetadata:
        """Return the metadata of a finished run with the current folder of its autoencoder.

        It may be where the recipe names it, at its recorded path, or beside a run that was moved.
        """
        recorded = Path(self.folder)
        runs_folder = processor.absolute().parent.parent  # of RUNS/RUN/processor
        candidates = [
            lambda: resolve_vae_folder(recipe),
            lambda: recorded,
            lambda: dependencies.get_dependencies_folder(runs_folder) / recorded.parent.name / recorded.name,
        ]
        owner = processor.parent if str(recipe.model.vae).startswith(dependencies.REFERENCE_PREFIX) else None  # type: ignore[attr-defined]
        folder = find_frozen_model(KIND, self.content, candidates, recorded_folder=self.folder, owner=owner)
        return self.model_copy(update={"folder": str(folder)})


@final
@dataclass(frozen=True)
class LatentSpace:
    """An autoencoder: its folder, and the shape in its config.json."""

    folder: Path
    shape: AutoencoderShape

    def build_metadata(self, grid: tuple[int, ...], channels: int) -> LatentMetadata:
        """Return the metadata to save with a run; `grid` and `channels` are those of the data."""
        return LatentMetadata(
            folder=str(self.folder),
            content=hash_model_folder(self.folder),
            scale=self.shape.scaling_factor,
            shift=self.shape.shift_factor,
            sample=(*grid, channels),
        )

    def compute_latent_sides(self, grid: tuple[int, ...], channels: int) -> tuple[tuple[int, ...], int]:
        """Return (grid, channels) of the latents of data with these sides."""
        if self.shape.channels != channels:
            hint = (
                f"set data.channels={self.shape.channels}"
                if self.shape.channels in (1, 3)
                else "train one on this data"
            )
            raise UsageError(
                f"model.vae: {self.folder} reads {self.shape.channels} channels, but the data has {channels}; {hint}"
            )
        return self.shape.latent_grid(grid), self.shape.latent_channels


def open_latent_space(recipe: Any, medium: Literal["image", "audio", "video"]) -> LatentSpace | None:
    """Return the autoencoder of a recipe, or None if it generates values directly."""
    if recipe.model.vae is None:
        return None
    folder = resolve_vae_folder(recipe)
    shape, is_audio = read_autoencoder_shape(folder), (folder / MEL).is_file()
    if is_audio != (medium == "audio") or shape.dims not in MEDIUM_DIMS[medium]:
        actual_medium = "audio" if is_audio else {1: "one axis", 2: "images", 3: "video"}[shape.dims]
        raise UsageError(
            f"model.vae: {folder} is an autoencoder of {actual_medium}, but the task is {medium}; give one of {medium}"
        )
    if medium == "audio" and recipe.model.axes != shape.dims:
        raise UsageError(
            f"model.axes: {recipe.model.axes}, but the latents of {folder} have {shape.dims}; "
            f"set model.axes={shape.dims}"
        )
    if medium != "audio" and recipe.data.normalise != "symmetric":
        raise UsageError(
            f"data.normalise: {recipe.data.normalise} is not supported: an autoencoder reads values from -1 to 1; "
            "remove it"
        )
    return LatentSpace(folder, shape)


def resolve_vae_folder(recipe: Any) -> Path:
    """Return the folder of `model.vae`: a dependency, a run, a diffusers pipeline, or the autoencoder itself."""
    return resolve_autoencoder_folder(recipe, recipe.model.vae, key="model.vae")


def resolve_autoencoder_folder(recipe: Any, name: str, *, key: str) -> Path:
    """Return the folder with the config.json of the autoencoder that `name` refers to."""
    message = "is not a folder; give a run, or a folder with an AutoencoderKL of diffusers"
    folder = dependencies.resolve_model_reference(recipe, name, key=key, missing_message=message).path
    component = find_component_folder(folder, "vae")
    if not (component / CONFIG).is_file():
        raise UsageError(f"{key}: {folder} has no {CONFIG}; give a run, or a folder with an AutoencoderKL of diffusers")
    return component.absolute()


def load_mel_processor(
    folder: Path, recipe: AudioRecipe, prepared: PreparedData, *, low: float = 0.0, high: float | None = None
) -> MelProcessor:
    """Return the mel processor of an audio autoencoder; raise UsageError if the data does not fit it."""
    processor, data = MelProcessor.load(folder), recipe.data
    settings = {"sample_rate": int(prepared.metadata["sample_rate"]), "low": low, "high": high}
    settings |= {"fft_size": data.fft_size, "hop_size": data.hop_size, "num_mels": data.num_mels}
    for key, value in settings.items():
        expected = getattr(processor.mel, key)
        if expected != value:
            is_band = key in ("low", "high")
            owner, remedy = (
                ("model.vocoder", "give a vocoder with that band")
                if is_band
                else (f"data.{key}", f"set data.{key}={expected}")
            )
            raise UsageError(f"{owner}: {value}, but model.vae ({folder}) was trained with {key} {expected}; {remedy}")
    sources: list[Any] = [
        open_media_source(recipe, prepared, name, is_training=False) for name in prepared.training_tables
    ]
    max_samples, rate = max(source.num_samples for source in sources), processor.mel.sample_rate
    if max_samples > processor.num_samples:
        seconds = processor.num_samples / rate
        raise UsageError(
            f"data.seconds: clips last up to {max_samples / rate:g} s, but model.vae ({folder}) reads {seconds:g} s; "
            f"set data.seconds={seconds:g}"
        )
    return processor


def compute_latents(
    metadata: LatentMetadata,
    shape: tuple[int, ...],
    tables: dict[str, tuple[Any, Source]],
    *,
    key: str,
    framework: str,
    device: str,
    progress: Callable[[str, int, int], None],
) -> dict[str, Table]:
    """Return a table of latents for each table, from the cache or encoded now.

    `tables` maps the name of a table to (its rows, its samples as the autoencoder reads them); `shape` is that of one latent.
    `framework` encodes, on the `device` of the recipe.
    """
    opened: list[Callable[[np.ndarray], np.ndarray]] = []

    def encode(values: np.ndarray) -> np.ndarray:
        if not opened:  # cached latents need no autoencoder
            opened.append(resolve_reference(OPEN_ENCODER, framework)(metadata.build_latents(), device))
        return opened[0](values)

    for rows, _ in tables.values():
        latent_cache.check_deterministic(rows)
    return {
        name: latent_cache.compute_latents(
            samples, key, model_hash=metadata.content, shape=shape, encode=encode, progress=progress
        )
        for name, (_, samples) in tables.items()
    }
