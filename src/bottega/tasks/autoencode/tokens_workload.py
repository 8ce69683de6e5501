"""The workload of tokenizers: autoencoders of images or audio whose latents are discrete codes.

A generator with `model.backbone: tokens` predicts the codes of an exported tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from bottega.config.error_messages import format_shape_error
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
from bottega.tasks.media_tables import MediaProcessor, MediaTables, build_media_data
from bottega.tasks.metadata import read_metadata
from bottega.tasks.sampler import Sampler
from bottega.tasks.table_data import TableData
from bottega.tasks.workload import Workload

METADATA_FILE = "codes.json"
CHUNK_SIZE = 256
"""Number of samples that are encoded at once."""
SHEET_COLUMNS = 8
"""Even, so that an image and its reconstruction are neighbours."""
MEL_RANGE = 2.0
"""Spectrograms are scaled so that most of their values lie between -1 and 1."""
TokensRecipe = ImageTokensRecipe | AudioTokensRecipe


class TokensMetadata(BaseModel):
    """Shapes of the model and of the data; saved with the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: CodesShape
    grid: tuple[int, ...]
    """Sides of the data, without channels."""


def open_workload(recipe: Recipe, *, progress: Callable[[str, int, int], None]) -> TokensWorkload:
    """Prepare the data of a recipe and choose the model."""
    assert isinstance(recipe, TokensRecipe)
    if isinstance(recipe, ImageTokensRecipe) and recipe.data.buckets is not None:
        raise UsageError("data.buckets: a tokenizer needs images of one shape; remove it")
    if recipe.model.dropout:
        raise UsageError(
            f"model.dropout: {recipe.model.dropout:g} has no effect: a tokenizer has no dropout; remove it"
        )
    prepared = prepare_media(recipe, progress=progress)
    if isinstance(recipe, AudioTokensRecipe):
        mel = fit_mel_processor(recipe, prepared, multiple=recipe.model.downsample)
        *grid, channels = mel.shape
    else:
        mel = None
        *grid, channels = load_image_encoder(prepared).bucket_shape(0)
    metadata = TokensMetadata(shape=_build_shape(recipe, grid, channels), grid=tuple(grid))
    return TokensWorkload(recipe, metadata, mel, prepared=prepared)


def reopen_workload(recipe: Recipe, processor: Path, fingerprint: str) -> TokensWorkload:
    """Return the workload of a finished run, from its saved processor."""
    assert isinstance(recipe, TokensRecipe)
    mel = MelProcessor.load(processor) if isinstance(recipe, AudioTokensRecipe) else None
    return TokensWorkload(recipe, _read_metadata(processor), mel, expected_fingerprint=fingerprint)


@final
class TokensWorkload(Workload):
    """An autoencoder whose latents are discrete codes."""

    metrics = ("loss", "mse", "psnr")

    def __init__(
        self,
        recipe: TokensRecipe,
        metadata: TokensMetadata,
        mel: MelProcessor | None,
        *,
        prepared: PreparedData | None = None,
        expected_fingerprint: str | None = None,
    ) -> None:
        """Take either prepared data, or the fingerprint that the data of a finished run must have."""
        self.recipe, self.metadata, self.shape, self.mel = recipe, metadata, metadata.shape, mel
        self.key: Literal["image", "mel"] = "image" if mel is None else "mel"
        self.unit = "images" if mel is None else "clips"
        base_model = recipe.model.from_ if prepared is not None else None
        self.task: Codes = Codes(
            key=self.key,
            shape=self.shape,
            distance=recipe.model.distance,
            commitment_weight=recipe.model.commitment_weight,
            value_range=_compute_value_range(recipe.data.normalise, self.shape.autoencoder.channels)
            if mel is None
            else MEL_RANGE,
            pretrained=str(_resolve_base_folder(base_model, self.shape)) if base_model is not None else None,
        )
        frame = (*metadata.grid, self.shape.autoencoder.channels)
        self.tables = MediaTables(recipe, frame=frame, classes=Classes(()), mel=mel)
        self.data: TableData = build_media_data(
            self.tables, prepared=prepared, expected_fingerprint=expected_fingerprint
        )
        self.processor = MediaProcessor(metadata, read=_read_metadata, write_files=self._write_metadata, mel=mel)
        self.sampler = TokensSampler(recipe, mel, self.data, key=self.key)

    def _write_metadata(self, folder: Path) -> None:
        (folder / METADATA_FILE).write_text(self.metadata.model_dump_json(indent=1) + "\n")

    def summarise(self, metrics: dict[str, float]) -> dict[str, float]:
        return self.task.summary(metrics)

    def measure_code_usage(self, models: Models, source: Source, *, device: Any) -> dict[str, float]:
        """Return `codes_used` (a fraction) and `code_perplexity` of a dataset: not means over samples, so all are counted at once."""
        codes = [
            models["model"].encode(torch.from_numpy(_read_chunk(source, start, self.key)).to(device)).cpu().numpy()
            for start in range(0, len(source), CHUNK_SIZE)
        ]
        return measure_code_usage(np.concatenate(codes), self.shape.num_codes)

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """Write config.json, model.safetensors and for audio mel.json, which `load_codes` opens."""
        data = self.recipe.data
        write_codes(models["model"], folder, input=data.input, normalise=data.normalise)
        if self.mel is not None:
            self.mel.save(folder)
        return {"library_name": "bottega"}


@final
class TokensSampler(Sampler):
    """Reconstructions of held-out samples, each beside its original."""

    def __init__(self, recipe: TokensRecipe, mel: MelProcessor | None, data: TableData, *, key: str) -> None:
        self.recipe, self.mel, self.data, self.key = recipe, mel, data, key

    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """Write reconstructions of validation samples, or of training samples if none are held out."""
        source = self.data.validation() or self.data.table(self.data.prepared.training_tables[0], is_training=False)
        x = _read_chunk(source, 0, self.key)[: self.recipe.samples.count]
        outputs = models["model"](torch.from_numpy(x).to(device))[0].float().cpu().numpy()
        pairs = np.stack([x, outputs], axis=1).reshape(-1, *x.shape[1:])
        captions = ["original", "from its codes"] * len(x)
        if self.mel is None:
            pixels = denormalise_pixels(pairs, mode=self.recipe.data.normalise)
            write_images(pixels, folder, captions=captions, columns=SHEET_COLUMNS)
        else:
            # Both by Griffin-Lim, so that the difference is due to the codes and not to the way from mel to audio.
            write_audio_files(self.mel.decode(pairs), self.mel.mel.sample_rate, folder, captions=captions)


def _read_chunk(source: Source, start: int, key: str) -> np.ndarray:
    index = np.arange(start, min(start + CHUNK_SIZE, len(source)))
    x: np.ndarray = source.rows(index, np.zeros_like(index))[key]
    return np.ascontiguousarray(x)


def _compute_value_range(mode: Any, channels: int) -> float:
    """Return the difference between white and black as the model reads them."""
    black_and_white = np.zeros((2, 1, 1, channels), np.uint8)
    black_and_white[1] = 255
    return float(np.ptp(normalise_pixels(black_and_white, mode=mode), axis=0).mean())


def _build_shape(recipe: TokensRecipe, grid: list[int], channels: int) -> CodesShape:
    model = recipe.model
    is_fsq = model.quantiser == "fsq"
    autoencoder = AutoencoderShape(
        dims=2,
        channels=channels,
        latent_channels=len(model.levels) if is_fsq else model.code_size,
        widths=stage_widths(model.hidden_size, model.downsample),
        layers_per_block=model.layers_per_block,
    )
    autoencoder.latent_grid(grid)  # raises if a side is not a multiple of model.downsample
    try:
        return CodesShape(
            autoencoder=autoencoder,
            levels=model.levels if is_fsq else None,
            codebook_size=None if is_fsq else model.codebook_size,
        )
    except ValidationError as error:
        raise UsageError(format_shape_error(error)) from None


def _read_metadata(processor: Path) -> TokensMetadata:
    return read_metadata(processor / METADATA_FILE, TokensMetadata.model_validate_json)


def _resolve_base_folder(name: str, shape: CodesShape) -> Path:
    """Return the folder to start from; raise UsageError if its model has other sizes."""
    folder = resolve_base_folder(name)
    base = read_codes_config(folder)[0]
    if base != shape:
        pairs = zip(_flatten(shape).items(), _flatten(base).items(), strict=True)
        key, needed, actual = next((key, needed, actual) for (key, needed), (_, actual) in pairs if needed != actual)
        raise UsageError(
            f"model.from: {name} has {key} {actual}, but this run needs {needed}; give another model, or set the recipe to {key} {actual}"
        )
    return folder


def _flatten(shape: CodesShape) -> dict[str, Any]:
    return {**shape.model_dump(exclude={"autoencoder"}), **shape.autoencoder.model_dump()}
