"""The branch of autoencoders: images, sound or video to smooth latents and back, for a generator to work in."""

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
from bottega.data.image.augment import denormalise_pixels
from bottega.data.image.write import write_images
from bottega.data.prepare.media import prepare_media
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.combine import Concat
from bottega.data.sources.samples import fit_mel_processor, load_image_encoder, open_media_source
from bottega.data.tables.classes import Classes
from bottega.data.video.source import VideoRows
from bottega.data.video.write import write_videos
from bottega.models.autoencoder.config import AutoencoderShape, stage_widths
from bottega.models.autoencoder.layout import export_autoencoder, read_autoencoder_shape
from bottega.models.autoencoder.vae import Autoencoder
from bottega.tasks.autoencode.config import AudioVaeRecipe, ImageVaeRecipe, VaeRecipe, VideoVaeRecipe
from bottega.tasks.autoencode.vae_task import Reconstruction
from bottega.tasks.generation.latent_space import resolve_autoencoder_folder
from bottega.tasks.generation.latents import encode_moments, reconstruct
from bottega.tasks.media_workload import MediaWorkload
from bottega.tasks.metadata import read_metadata

METADATA_FILE = "autoencoder.json"
MEASURED, CHUNK = 512, 32
"""Samples that the scale of the latents is measured on, and how many of them at once."""
PAIRS = 4
"""Originals with what came back of them, in a row of a sheet."""
MediaVaeRecipe = ImageVaeRecipe | AudioVaeRecipe | VideoVaeRecipe
KEYS: dict[str, Literal["image", "mel", "video"]] = {"image": "image", "audio": "mel", "video": "video"}
UNITS = {"image": "images", "audio": "sounds", "video": "clips"}


class VaeMetadata(BaseModel):
    """What a run knows of its data once it is prepared."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: AutoencoderShape
    grid: tuple[int, ...]
    """Sides of the data, without channels."""
    fps: int | None = None


def prepare(recipe: Recipe, *, say: Callable[[str, int, int], None]) -> VaeWorkload:
    checked = _checked(recipe)
    prepared = prepare_media(checked, progress=say)
    start = resolve_autoencoder_folder(checked, checked.model.from_, key="model.from") if checked.model.from_ else None
    mel = _mel(checked, prepared) if isinstance(checked, AudioVaeRecipe) else None
    return VaeWorkload(checked, _facts(checked, prepared, mel, start), mel, prepared=prepared, start=start)


def reopen(recipe: Recipe, processor: Path, fingerprint: str) -> VaeWorkload:
    checked = _checked(recipe)
    mel = MelProcessor.load(processor) if isinstance(checked, AudioVaeRecipe) else None
    return VaeWorkload(checked, _read_facts(processor), mel, expected=fingerprint)


def _checked(recipe: Recipe) -> MediaVaeRecipe:
    assert isinstance(recipe, VaeRecipe)
    assert isinstance(recipe, MediaVaeRecipe)
    if recipe.model.dropout:
        raise UsageError(f"model.dropout: {recipe.model.dropout:g}, and an autoencoder has none; leave it out")
    if not isinstance(recipe, AudioVaeRecipe):
        if recipe.data.buckets is not None:
            raise UsageError("data.buckets: an autoencoder sees pictures of one shape; leave it out")
        if recipe.data.normalise != "symmetric":
            raise UsageError(
                f"data.normalise: {recipe.data.normalise}, and an autoencoder reads values from -1 to 1; leave it out"
            )
    return recipe


@final
class VaeWorkload(MediaWorkload):
    metrics = ("loss", "mse", "psnr", "kl")

    def __init__(
        self,
        recipe: MediaVaeRecipe,
        facts: VaeMetadata,
        mel: MelProcessor | None,
        *,
        prepared: PreparedData | None = None,
        expected: str | None = None,
        start: Path | None = None,
    ) -> None:
        """Either with prepared data, or again from the codec of a finished run and the fingerprint it had."""
        super().__init__(recipe, prepared, expected=expected)
        self.facts, self.mel = facts, mel
        self.unit, self.key = UNITS[recipe.data.input], KEYS[recipe.data.input]
        # Spectrograms have no ends; most of their values are between -1 and 1, as all of pictures are.
        self.task: Reconstruction = Reconstruction(
            key=self.key,
            shape=facts.shape,
            kl_weight=recipe.model.kl_weight,
            distance=recipe.model.distance,
            value_range=2.0,
            pretrained=str(start) if start is not None else None,
        )

    def frame(self) -> tuple[int, ...]:
        return (*self.facts.grid[-2:], self.facts.shape.channels)

    def class_names(self) -> Classes:
        return Classes(())

    def summarise(self, metrics: dict[str, float]) -> dict[str, float]:
        return self.task.summary(metrics)

    @property
    def metadata(self) -> VaeMetadata:
        return self.facts

    def read_metadata(self, folder: Path) -> VaeMetadata:
        return _read_facts(folder)

    def write_processor(self, folder: Path) -> None:
        (folder / METADATA_FILE).write_text(self.facts.model_dump_json(indent=1) + "\n")
        if self.mel is not None:
            self.mel.save(folder)

    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """Held-out samples, or where none are held out training ones, each beside what comes back of it."""
        name = "validation" if "validation" in self.prepared.tables else self.prepared.training_tables[0]
        rows, seen = self.read_raw(name), self._limited(name, self.table(name, is_training=False))
        index = np.arange(min(self.recipe.samples.count, len(rows)))
        values = seen.rows(index, np.zeros_like(index))[self.key]
        found = reconstruct(models["model"], torch.from_numpy(values).to(device)).cpu().numpy()
        captions = [f"{number:02d}{which}" for number in index for which in ("", " back")]
        if self.mel is not None:
            sounds = rows.rows(index, np.zeros_like(index))["audio"]
            back = self.mel.decode(found.reshape(len(found), *self.mel.shape))
            write_audio_files(_in_turns(sounds, back), self.mel.mel.sample_rate, folder, captions=captions)
            return
        pixels = _in_turns(*(denormalise_pixels(x, mode="symmetric") for x in (values, found)))
        if self.facts.fps is not None:
            write_videos(pixels, self.facts.fps, folder, captions=captions, columns=2 * PAIRS)
        else:
            write_images(pixels, folder, captions=captions, columns=2 * PAIRS)

    def example_flags(self) -> None:
        """Nothing can be generated."""

    def export(self, models: Models, folder: Path) -> dict[str, Any]:
        """An AutoencoderKL of images; the same layout for sound and video, which diffusers has no model for."""
        shape = self.facts.shape.model_copy(update={"scaling_factor": self._scale(models["model"])})
        export_autoencoder(models["model"].state_dict(), shape, folder, sample_size=self.facts.grid[-1])
        if self.mel is not None:
            self.mel.save(folder)
        return {"library_name": "diffusers" if self.recipe.data.input == "image" else "bottega"}

    def _scale(self, model: Autoencoder) -> float:
        """What makes the mean square of latents 1: over up to 512 samples, evenly spaced, with the variance of their
        draws by formula. No shift, which the stock pipelines of diffusers would not undo."""
        source = Concat([self.table(name, is_training=False) for name in self.prepared.training_tables])
        places = np.unique(np.linspace(0, len(source) - 1, min(MEASURED, len(source))).astype(np.int64))
        device, number, squares = next(model.parameters()).device, 0, 0.0
        for first in range(0, len(places), CHUNK):
            index = places[first : first + CHUNK]
            values = source.rows(index, np.zeros_like(index))[self.key]
            mean, log_variance = encode_moments(model, torch.from_numpy(values).to(device)).double().chunk(2, dim=-1)
            number += mean.numel()
            squares += float((mean.square() + log_variance.exp()).sum())
        # Six digits, so that a processor that adds in another order measures the same.
        return float(f"{(number / max(squares, 1e-12)) ** 0.5:.6g}")


def _in_turns(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """[n, ...] and [n, ...] as [2 n, ...]: one of the first, one of the second, and so on."""
    return np.stack([first, second], axis=1).reshape(-1, *first.shape[1:])


def _mel(recipe: AudioVaeRecipe, prepared: PreparedData) -> MelProcessor:
    factor = recipe.model.downsample
    if recipe.model.axes == 2 and recipe.data.num_mels % factor:
        raise UsageError(f"data.num_mels: {recipe.data.num_mels} is not a multiple of model.downsample {factor}")
    # Twice, so that the latents of a generator can also be cut into patches of two.
    return fit_mel_processor(recipe, prepared, multiple=2 * factor)


def _facts(recipe: MediaVaeRecipe, prepared: PreparedData, mel: MelProcessor | None, start: Path | None) -> VaeMetadata:
    model, fps, more = recipe.model, None, dict[str, Any]()
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
        more = {"causal_time": True, "temporal_downsample": recipe.model.temporal_downsample}
        rows = open_media_source(recipe, prepared, name, is_training=False)
        assert isinstance(rows, VideoRows)
        fps = rows.fps
    else:
        height, width, channels = load_image_encoder(prepared).bucket_shape(0)
        grid = (height, width)
    if start is not None:
        # What a recipe has no key for is as it was.
        known = read_autoencoder_shape(start)
        more |= {name: getattr(known, name) for name in ("norm_groups", "mid_attention", "quant_conv")}
    try:
        shape = AutoencoderShape(
            dims=len(grid),
            channels=channels,
            latent_channels=model.latent_channels,
            widths=stage_widths(model.hidden_size, model.downsample),
            layers_per_block=model.layers_per_block,
            **more,
        )
    except ValidationError as error:
        raise UsageError(f"model: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
    shape.latent_grid(grid)  # or which side of the data does not fit
    return VaeMetadata(shape=shape, grid=grid, fps=fps)


def _read_facts(processor: Path) -> VaeMetadata:
    return read_metadata(processor / METADATA_FILE, VaeMetadata.model_validate_json)
