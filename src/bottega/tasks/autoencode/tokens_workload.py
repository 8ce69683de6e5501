"""The branch of tokenizers: images or sounds, and an autoencoder whose latents are whole numbers.

An exported one is what a language model over codes generates with: branches/codes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from bottega.config.recipe import Recipe
from bottega.core.errors import UsageError
from bottega.core.types import Models
from bottega.data.audio.mel import MelProcessor
from bottega.data.audio.write import write_audio_files
from bottega.data.image.augment import denormalise_pixels, normalise_pixels
from bottega.data.image.write import write_images
from bottega.data.prepare.media import prepare_media
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.samples import fit_mel_processor, load_image_encoder
from bottega.data.sources.source import Source
from bottega.data.tables.classes import Classes
from bottega.models.autoencoder.codes_folder import read_codes_config, write_codes
from bottega.models.autoencoder.config import AutoencoderShape, CodesShape, stage_widths
from bottega.tasks.autoencode.tokens_config import AudioTokensRecipe, ImageTokensRecipe
from bottega.tasks.autoencode.tokens_task import Codes, measure_code_usage
from bottega.tasks.base_model import resolve_base_folder
from bottega.tasks.media_workload import MediaWorkload
from bottega.tasks.metadata import read_metadata

SHAPE = "codes.json"
CHUNK = 256
SHEET_COLUMNS = 8
"""Even, so that a picture and what came back of it are neighbours."""
TokensRecipe = ImageTokensRecipe | AudioTokensRecipe


class TokensMetadata(BaseModel):
    """What a run remembers of its model and of the sides that its data had."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: CodesShape
    grid: tuple[int, ...]


def prepare(recipe: Recipe, *, say: Callable[[str, int, int], None]) -> TokensWorkload:
    assert isinstance(recipe, TokensRecipe)
    if isinstance(recipe, ImageTokensRecipe) and recipe.data.buckets is not None:
        raise UsageError("data.buckets: a tokenizer sees pictures of one shape; leave it out")
    if recipe.model.dropout:
        raise UsageError(f"model.dropout: {recipe.model.dropout:g}, and a tokenizer has none; leave it out")
    prepared = prepare_media(recipe, progress=say)
    if isinstance(recipe, AudioTokensRecipe):
        mel = fit_mel_processor(recipe, prepared, multiple=recipe.model.downsample)
        *grid, channels = mel.shape
    else:
        mel = None
        *grid, channels = load_image_encoder(prepared).bucket_shape(0)
    kept = TokensMetadata(shape=_shape_of(recipe, grid, channels), grid=tuple(grid))
    return TokensWorkload(recipe, kept, mel, prepared=prepared)


def reopen(recipe: Recipe, processor: Path, fingerprint: str) -> TokensWorkload:
    assert isinstance(recipe, TokensRecipe)
    mel = MelProcessor.load(processor) if isinstance(recipe, AudioTokensRecipe) else None
    return TokensWorkload(recipe, _read(processor), mel, expected=fingerprint)


@final
class TokensWorkload(MediaWorkload):
    metrics = ("loss", "mse", "psnr")

    def __init__(
        self,
        recipe: TokensRecipe,
        kept: TokensMetadata,
        mel: MelProcessor | None,
        *,
        prepared: PreparedData | None = None,
        expected: str | None = None,
    ) -> None:
        """Either with prepared data, or again from the codec of a finished run and the fingerprint it had."""
        super().__init__(recipe, prepared, expected=expected)
        self.kept, self.shape, self.mel = kept, kept.shape, mel
        self.key: Literal["image", "mel"] = "image" if mel is None else "mel"
        self.unit = "images" if mel is None else "sounds"
        start = recipe.model.from_ if prepared is not None else None
        self.task: Codes = Codes(
            key=self.key,
            shape=self.shape,
            distance=recipe.model.distance,
            commitment_weight=recipe.model.commitment_weight,
            value_range=self._value_range(),
            pretrained=str(_start(start, self.shape)) if start is not None else None,
        )

    def frame(self) -> tuple[int, ...]:
        return (*self.kept.grid, self.shape.autoencoder.channels)

    def class_names(self) -> Classes:
        return Classes(())

    @property
    def metadata(self) -> TokensMetadata:
        return self.kept

    def read_metadata(self, folder: Path) -> TokensMetadata:
        return _read(folder)

    def write_processor(self, folder: Path) -> None:
        if self.mel is not None:
            self.mel.save(folder)
        (folder / SHAPE).write_text(self.kept.model_dump_json(indent=1) + "\n")

    def summarise(self, metrics: dict[str, float]) -> dict[str, float]:
        return self.task.summary(metrics)

    def code_usage(self, models: Models, source: Source, *, device: Any) -> dict[str, float]:
        """How many of the codes a data set uses. No mean over its samples, so it is counted over all of them at once."""
        codes = [
            models["model"].encode(torch.from_numpy(self._some(source, first)).to(device)).cpu().numpy()
            for first in range(0, len(source), CHUNK)
        ]
        return measure_code_usage(np.concatenate(codes), self.shape.num_codes)

    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """Samples that were held out, where there are such, each beside what comes back of it."""
        source = self.validation() or self.table(self.prepared.training_tables[0], is_training=False)
        x = self._some(source, 0)[: self.recipe.samples.count]
        found = models["model"](torch.from_numpy(x).to(device))[0].float().cpu().numpy()
        pairs = np.stack([x, found], axis=1).reshape(-1, *x.shape[1:])
        captions = ["original", "from its codes"] * len(x)
        if self.mel is None:
            pixels = denormalise_pixels(pairs, mode=self.recipe.data.normalise)
            write_images(pixels, folder, captions=captions, columns=SHEET_COLUMNS)
        else:
            # Both by Griffin-Lim: what is heard is then the codes, and not the way from a spectrogram to sound.
            write_audio_files(self.mel.decode(pairs), self.mel.mel.sample_rate, folder, captions=captions)

    def example_flags(self) -> None:
        return None

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """config.json, model.safetensors and for sound mel.json; `bottega.models.autoencoder.codes_folder.load_codes` opens it."""
        said = {"input": self.recipe.data.input, "normalise": self.recipe.data.normalise}
        write_codes(models["model"], folder, **said)
        if self.mel is not None:
            self.mel.save(folder)
        return {"library_name": "bottega"}

    def _some(self, source: Source, first: int) -> np.ndarray:
        index = np.arange(first, min(first + CHUNK, len(source)))
        x: np.ndarray = source.rows(index, np.zeros_like(index))[self.key]
        return np.ascontiguousarray(x)

    def _value_range(self) -> float:
        """From black to white. Spectrograms are scaled so that most of their values lie between -1 and 1."""
        if self.mel is not None:
            return 2.0
        ends = np.zeros((2, 1, 1, self.shape.autoencoder.channels), np.uint8)
        ends[1] = 255
        return float(np.ptp(normalise_pixels(ends, mode=self.recipe.data.normalise), axis=0).mean())


def _shape_of(recipe: TokensRecipe, grid: list[int], channels: int) -> CodesShape:
    model = recipe.model
    is_finite = model.quantiser == "fsq"
    inner = AutoencoderShape(
        dims=2,
        channels=channels,
        latent_channels=len(model.levels) if is_finite else model.code_size,
        widths=stage_widths(model.hidden_size, model.downsample),
        layers_per_block=model.layers_per_block,
    )
    inner.latent_grid(grid)  # sides that cannot be halved so often are an error now
    try:
        return CodesShape(
            autoencoder=inner,
            levels=model.levels if is_finite else None,
            codebook_size=None if is_finite else model.codebook_size,
        )
    except ValidationError as error:
        raise UsageError(f"model.{error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def _read(processor: Path) -> TokensMetadata:
    return read_metadata(processor / SHAPE, TokensMetadata.model_validate_json)


def _start(name: str, shape: CodesShape) -> Path:
    """The folder to start from, refused by name where its model is another one."""
    folder = resolve_base_folder(name)
    found = read_codes_config(folder)[0]
    if found != shape:
        pairs = zip(_flat(shape).items(), _flat(found).items(), strict=True)
        key, asked, has = next((key, asked, has) for (key, asked), (_, has) in pairs if asked != has)
        raise UsageError(f"model.from: {name} has {key} {has}, and {asked} is needed here")
    return folder


def _flat(shape: CodesShape) -> dict[str, Any]:
    return {**shape.model_dump(exclude={"autoencoder"}), **shape.autoencoder.model_dump()}
