"""The workload of autoencoders with continuous latents (VAE) of images, audio or video."""

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
from bottega.data.image.augment import denormalise_pixels
from bottega.data.image.write import write_images
from bottega.data.prepare.media import prepare_media
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.samples import fit_mel_processor, load_image_encoder, open_media_source
from bottega.data.sources.source import Source
from bottega.data.tables.classes import Classes
from bottega.data.video.source import VideoRows
from bottega.data.video.write import write_videos
from bottega.models.autoencoder.config import AutoencoderShape, stage_widths
from bottega.models.autoencoder.layout import export_autoencoder, read_autoencoder_shape
from bottega.models.autoencoder.torch import Autoencoder
from bottega.tasks.autoencode.config import AudioVaeRecipe, ImageVaeRecipe, VaeRecipe, VideoVaeRecipe
from bottega.tasks.autoencode.vae_task import Reconstruction
from bottega.tasks.generation.latent_space import resolve_autoencoder_folder
from bottega.tasks.generation.torch_latents import encode_moments, reconstruct
from bottega.tasks.media_tables import MediaProcessor, MediaTables, build_media_data
from bottega.tasks.metadata import read_metadata
from bottega.tasks.sampler import Sampler
from bottega.tasks.table_data import TableData
from bottega.tasks.workload import Workload

METADATA_FILE = "autoencoder.json"
NUM_SCALE_SAMPLES, CHUNK_SIZE = 512, 32
"""Number of samples that the scale of the latents is measured on, and how many of them are encoded at once."""
PAIRS_PER_ROW = 4
"""Pairs of an original and its reconstruction in a row of the contact sheet."""
MediaVaeRecipe = ImageVaeRecipe | AudioVaeRecipe | VideoVaeRecipe
BATCH_KEYS: dict[str, Literal["image", "mel", "video"]] = {"image": "image", "audio": "mel", "video": "video"}
UNITS = {"image": "images", "audio": "clips", "video": "clips"}


class VaeMetadata(BaseModel):
    """Shapes found in the prepared data; saved with the run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: AutoencoderShape
    grid: tuple[int, ...]
    """Sides of the data, without channels."""
    fps: int | None = None
    """Frames per second of video; None for images and audio."""


def open_workload(recipe: Recipe, *, progress: Callable[[str, int, int], None]) -> VaeWorkload:
    """Prepare the data of a recipe and choose the model."""
    checked = _check_recipe(recipe)
    prepared = prepare_media(checked, progress=progress)
    base_folder = (
        resolve_autoencoder_folder(checked, checked.model.from_, key="model.from") if checked.model.from_ else None
    )
    mel = _fit_mel(checked, prepared) if isinstance(checked, AudioVaeRecipe) else None
    return VaeWorkload(
        checked, _build_metadata(checked, prepared, mel, base_folder), mel, prepared=prepared, base_folder=base_folder
    )


def reopen_workload(recipe: Recipe, processor: Path, fingerprint: str) -> VaeWorkload:
    """Return the workload of a finished run, from its saved processor."""
    checked = _check_recipe(recipe)
    mel = MelProcessor.load(processor) if isinstance(checked, AudioVaeRecipe) else None
    return VaeWorkload(checked, _read_metadata(processor), mel, expected_fingerprint=fingerprint)


def _check_recipe(recipe: Recipe) -> MediaVaeRecipe:
    assert isinstance(recipe, VaeRecipe)
    assert isinstance(recipe, MediaVaeRecipe)
    if recipe.model.dropout:
        raise UsageError(
            f"model.dropout: {recipe.model.dropout:g} has no effect: an autoencoder has no dropout; remove it"
        )
    if not isinstance(recipe, AudioVaeRecipe):
        if recipe.data.buckets is not None:
            raise UsageError("data.buckets: an autoencoder needs images of one shape; remove it")
        if recipe.data.normalise != "symmetric":
            raise UsageError(
                f"data.normalise: {recipe.data.normalise} is not supported: an autoencoder reads values from -1 to 1; "
                "remove it"
            )
    return recipe


@final
class VaeWorkload(Workload):
    """An autoencoder with continuous latents."""

    metrics = ("loss", "mse", "psnr", "kl")

    def __init__(
        self,
        recipe: MediaVaeRecipe,
        metadata: VaeMetadata,
        mel: MelProcessor | None,
        *,
        prepared: PreparedData | None = None,
        expected_fingerprint: str | None = None,
        base_folder: Path | None = None,
    ) -> None:
        """Take either prepared data, or the fingerprint that the data of a finished run must have."""
        self.recipe, self.metadata, self.mel = recipe, metadata, mel
        self.unit, self.key = UNITS[recipe.data.input], BATCH_KEYS[recipe.data.input]
        # Pixels are from -1 to 1; spectrograms are unbounded, with most values in that range.
        self.task: Reconstruction = Reconstruction(
            key=self.key,
            shape=metadata.shape,
            kl_weight=recipe.model.kl_weight,
            distance=recipe.model.distance,
            value_range=2.0,
            pretrained=str(base_folder) if base_folder is not None else None,
        )
        frame = (*metadata.grid[-2:], metadata.shape.channels)
        self.tables = MediaTables(recipe, frame=frame, classes=Classes(()), mel=mel)
        self.data: TableData = build_media_data(
            self.tables, prepared=prepared, expected_fingerprint=expected_fingerprint
        )
        self.processor = MediaProcessor(metadata, read=_read_metadata, write_files=self._write_metadata, mel=mel)
        self.sampler = VaeSampler(recipe, metadata, self.tables, self.data, key=self.key)

    def summarise(self, metrics: dict[str, float]) -> dict[str, float]:
        return self.task.summary(metrics)

    def _write_metadata(self, folder: Path) -> None:
        (folder / METADATA_FILE).write_text(self.metadata.model_dump_json(indent=1) + "\n")

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """Write an AutoencoderKL of diffusers for images; audio and video have the same layout, for which diffusers has no class."""
        scale = _compute_latent_scale(models["model"], self.data.training_samples(), self.key)
        shape = self.metadata.shape.model_copy(update={"scaling_factor": scale})
        export_autoencoder(models["model"].state_dict(), shape, folder, sample_size=self.metadata.grid[-1])
        if self.mel is not None:
            self.mel.save(folder)
        return {"library_name": "diffusers" if self.recipe.data.input == "image" else "bottega"}


@final
class VaeSampler(Sampler):
    """Reconstructions of held-out samples, each beside its original."""

    def __init__(
        self, recipe: MediaVaeRecipe, metadata: VaeMetadata, tables: MediaTables, data: TableData, *, key: str
    ) -> None:
        self.recipe, self.metadata, self.tables, self.data, self.key = recipe, metadata, tables, data, key

    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """Write reconstructions of validation samples, or of training samples if none are held out."""
        prepared, mel = self.data.prepared, self.tables.mel
        name = "validation" if "validation" in prepared.tables else prepared.training_tables[0]
        rows = self.data.limit(name, self.tables.read_rows(prepared, name))
        samples = self.data.limit(name, self.data.table(name, is_training=False))
        index = np.arange(min(self.recipe.samples.count, len(rows)))
        values = samples.rows(index, np.zeros_like(index))[self.key]
        outputs = reconstruct(models["model"], torch.from_numpy(values).to(device)).cpu().numpy()
        captions = [f"{number:02d}{suffix}" for number in index for suffix in ("", " decoded")]
        if mel is not None:
            originals = rows.rows(index, np.zeros_like(index))["audio"]
            audio = mel.decode(outputs.reshape(len(outputs), *mel.shape))
            write_audio_files(_interleave(originals, audio), mel.mel.sample_rate, folder, captions=captions)
            return
        pixels = _interleave(*(denormalise_pixels(x, mode="symmetric") for x in (values, outputs)))
        if self.metadata.fps is not None:
            write_videos(pixels, self.metadata.fps, folder, captions=captions, columns=2 * PAIRS_PER_ROW)
        else:
            write_images(pixels, folder, captions=captions, columns=2 * PAIRS_PER_ROW)


def _compute_latent_scale(model: Autoencoder, source: Source, key: str) -> float:
    """Return the factor that makes the mean square of latents 1, as the scaling factor of diffusers.

    It is measured on up to NUM_SCALE_SAMPLES evenly spaced training samples; the variance of the sampled latents is computed by formula.
    Latents are not shifted, because the stock pipelines of diffusers would not undo a shift.
    """
    indices = np.unique(np.linspace(0, len(source) - 1, min(NUM_SCALE_SAMPLES, len(source))).astype(np.int64))
    device, num_values, sum_of_squares = next(model.parameters()).device, 0, 0.0
    for start in range(0, len(indices), CHUNK_SIZE):
        index = indices[start : start + CHUNK_SIZE]
        values = source.rows(index, np.zeros_like(index))[key]
        mean, log_variance = encode_moments(model, torch.from_numpy(values).to(device)).double().chunk(2, dim=-1)
        num_values += mean.numel()
        sum_of_squares += float((mean.square() + log_variance.exp()).sum())
    # Six digits, so that a CPU that sums in another order gives the same result.
    return float(f"{(num_values / max(sum_of_squares, 1e-12)) ** 0.5:.6g}")


def _interleave(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Interleave two arrays (n, ...) to (2 n, ...): one row of the first, one of the second, and so on."""
    return np.stack([first, second], axis=1).reshape(-1, *first.shape[1:])


def _fit_mel(recipe: AudioVaeRecipe, prepared: PreparedData) -> MelProcessor:
    factor = recipe.model.downsample
    if recipe.model.axes == 2 and recipe.data.num_mels % factor:
        raise UsageError(f"data.num_mels: {recipe.data.num_mels} is not a multiple of model.downsample {factor}")
    # Twice the factor, so that a generator can cut the latents into patches of two.
    return fit_mel_processor(recipe, prepared, multiple=2 * factor)


def _build_metadata(
    recipe: MediaVaeRecipe, prepared: PreparedData, mel: MelProcessor | None, base_folder: Path | None
) -> VaeMetadata:
    model, fps, shape_options = recipe.model, None, dict[str, Any]()
    if isinstance(recipe, AudioVaeRecipe):
        assert mel is not None
        frames, bands, channels = mel.shape
        grid: tuple[int, ...] = (frames, bands)
        if recipe.model.axes == 1:
            grid, channels = (frames,), bands
    elif isinstance(recipe, VideoVaeRecipe):
        name = prepared.training_tables[0]
        height, width, channels = prepared.table(name).columns["video"].shape
        grid = (recipe.data.num_frames, height, width)
        shape_options = {"causal_time": True, "temporal_downsample": recipe.model.temporal_downsample}
        rows = open_media_source(recipe, prepared, name, is_training=False)
        assert isinstance(rows, VideoRows)
        fps = rows.fps
    else:
        height, width, channels = load_image_encoder(prepared).bucket_shape(0)
        grid = (height, width)
    if base_folder is not None:
        # Options that the recipe has no key for are those of the base model.
        base = read_autoencoder_shape(base_folder)
        shape_options |= {name: getattr(base, name) for name in ("norm_groups", "mid_attention", "quant_conv")}
    try:
        shape = AutoencoderShape(
            dims=len(grid),
            channels=channels,
            latent_channels=model.latent_channels,
            widths=stage_widths(model.hidden_size, model.downsample),
            layers_per_block=model.layers_per_block,
            **shape_options,
        )
    except ValidationError as error:
        raise UsageError(format_shape_error(error)) from None
    shape.latent_grid(grid)  # raises if a side of the data does not fit
    return VaeMetadata(shape=shape, grid=grid, fps=fps)


def _read_metadata(processor: Path) -> VaeMetadata:
    return read_metadata(processor / METADATA_FILE, VaeMetadata.model_validate_json)
