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
from bottega.data.audio.mel import MelCodec
from bottega.data.prepare.prepared import Prepared
from bottega.data.sources import latents as kept
from bottega.data.sources.samples import media_samples
from bottega.data.sources.source import Source
from bottega.data.tables.shards import Table
from bottega.models.autoencoder.config import AutoencoderShape
from bottega.models.autoencoder.layout import read_autoencoder_shape
from bottega.models.build import build_model
from bottega.models.folders.resolve import CONFIG, component_folder
from bottega.tasks import needs
from bottega.tasks.frozen import check_same, content_of, found_again
from bottega.tasks.generation.config import AudioRecipe
from bottega.tasks.generation.latents import Latents, moments

WHAT = "autoencoder"
DIMENSIONS = {"image": (2,), "audio": (1, 2), "video": (3,)}


class LatentFacts(BaseModel):
    """What a run keeps of its autoencoder, beside the shape of what is generated."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    content: str
    """Its hash: a generator understands no other."""
    scale: float
    shift: float
    sample: tuple[int, ...]
    """Sides and channels of the data."""

    def of_task(self) -> Latents:
        return Latents(folder=self.folder, scale=self.scale, shift=self.shift)

    def check(self, before: LatentFacts | None) -> None:
        """A run goes on in the latents it began with, or not at all."""
        was, content = (before.folder, before.content) if before is not None else ("none", None)
        check_same(WHAT, now=self.content, before=content, named=self.folder, was=was)

    def again(self, recipe: Recipe, codec: Path) -> LatentFacts:
        """Of a finished run: the folder may lie where the recipe says, where it was, or beside a run that was moved."""
        known, runs = Path(self.folder), codec.absolute().parent.parent
        places = [
            lambda: vae_folder(recipe),
            lambda: known,
            lambda: needs.parts_folder(runs) / known.parent.name / known.name,
        ]
        part_of = codec.parent if str(recipe.model.vae).startswith(needs.PREFIX) else None  # type: ignore[attr-defined]
        found = found_again(WHAT, self.content, places, known=self.folder, part_of=part_of)
        return self.model_copy(update={"folder": str(found)})


@final
@dataclass(frozen=True)
class LatentSpace:
    """An autoencoder that is there: its folder, and what its config says."""

    folder: Path
    shape: AutoencoderShape

    def facts(self, grid: tuple[int, ...], channels: int) -> LatentFacts:
        return LatentFacts(
            folder=str(self.folder),
            content=content_of(self.folder),
            scale=self.shape.scaling_factor,
            shift=self.shape.shift_factor,
            sample=(*grid, channels),
        )

    def sides(self, grid: tuple[int, ...], channels: int) -> tuple[tuple[int, ...], int]:
        """(grid, channels) of the latents of such data."""
        if self.shape.channels != channels:
            hint = f"set data.channels={self.shape.channels}" if self.shape.channels in (1, 3) else "train one for them"
            raise UsageError(
                f"model.vae: {self.folder} reads {self.shape.channels} channels, and the data have {channels}; {hint}"
            )
        return self.shape.latent_grid(grid), self.shape.latent_channels


def open_space(recipe: Any, medium: Literal["image", "audio", "video"]) -> LatentSpace | None:
    """That of a recipe, or None where it generates plain values."""
    if recipe.model.vae is None:
        return None
    folder = vae_folder(recipe)
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


def vae_folder(recipe: Any) -> Path:
    """Where `model.vae` points: a part of the recipe, a run, a pipeline of diffusers, or the autoencoder itself."""
    return autoencoder_folder(recipe, recipe.model.vae, key="model.vae")


def autoencoder_folder(recipe: Any, name: str, *, key: str) -> Path:
    """The folder with the autoencoder's own config.json, for one that a person would name."""
    absent = "is no folder; name a run, or one with an AutoencoderKL of diffusers"
    folder = needs.resolve_named(recipe, name, key=key, missing=absent).path
    found = component_folder(folder, "vae")
    if not (found / CONFIG).is_file():
        raise UsageError(f"{key}: {folder} has no {CONFIG}; name a run, or a folder with an AutoencoderKL of diffusers")
    return found.absolute()


def codec_of(
    folder: Path, recipe: AudioRecipe, prepared: Prepared, *, low: float = 0.0, high: float | None = None
) -> MelCodec:
    """How an autoencoder of sound sees it, which is how its latents are made; refused for sounds of another kind."""
    codec, data = MelCodec.load(folder), recipe.data
    asked = {"sample_rate": int(prepared.meta["sample_rate"]), "low": low, "high": high}
    asked |= {"fft_size": data.fft_size, "hop_size": data.hop_size, "num_mels": data.num_mels}
    for key, value in asked.items():
        known = getattr(codec.mel, key)
        if known != value:
            owner = "model.vocoder" if key in ("low", "high") else f"data.{key}"
            raise UsageError(f"{owner}: {value}, and model.vae ({folder}) was trained with {key} {known}")
    rows: list[Any] = [media_samples(recipe, prepared, name, is_training=False) for name in prepared.training_tables]
    longest, rate = max(one.num_samples for one in rows), codec.mel.sample_rate
    if longest > codec.num_samples:
        seconds = codec.num_samples / rate
        raise UsageError(
            f"data.seconds: sounds last up to {longest / rate:g} s, and model.vae ({folder}) knows {seconds:g} s; "
            f"set data.seconds={seconds:g}"
        )
    return codec


def compute(
    facts: LatentFacts,
    shape: tuple[int, ...],
    tables: dict[str, tuple[Any, Source]],
    *,
    key: str,
    device: Any,
    say: Callable[[str, int, int], None],
) -> dict[str, Table]:
    """The latents of each table, whose samples come as they are and as the model sees them; `shape` is that of a latent."""
    import torch

    opened: list[Any] = []

    def encode(values: np.ndarray) -> np.ndarray:
        if not opened:  # what is in the cache already needs no autoencoder
            opened.append(build_model(facts.of_task().spec(), 0).to(device).eval())
        return moments(opened[0], torch.from_numpy(values).to(device)).cpu().numpy()

    for rows, _ in tables.values():
        kept.check_fixed(rows)
    return {
        name: kept.stored(samples, key, content=facts.content, shape=shape, encode=encode, progress=say)
        for name, (_, samples) in tables.items()
    }
