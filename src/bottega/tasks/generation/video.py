"""The video branch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np

from bottega.config.recipe import Recipe
from bottega.core.errors import UsageError
from bottega.data.image.augment import denormalise_pixels, normalise_pixels
from bottega.data.prepare.media import prepare_media
from bottega.data.sources.samples import open_media_source
from bottega.data.video.source import VideoRows
from bottega.data.video.write import ANIMATIONS, write_videos
from bottega.tasks.generation.config import VideoRecipe
from bottega.tasks.generation.workload import GenerationWorkload, GeneratorMetadata, Say


def prepare(recipe: Recipe, *, say: Say) -> VideoWorkload:
    assert isinstance(recipe, VideoRecipe)
    if recipe.model.backbone == "unet":
        raise UsageError("model.backbone: unet is for pictures and mel spectrograms; video takes dit")
    return VideoWorkload(recipe, prepare_media(recipe, progress=say)).keep_latents(say)


def reopen(recipe: Recipe, processor: Path, fingerprint: str) -> VideoWorkload:
    assert isinstance(recipe, VideoRecipe)
    return VideoWorkload(recipe, None, processor=processor, expected=fingerprint)


@final
class VideoWorkload(GenerationWorkload):
    key = medium = "video"
    recipe: VideoRecipe
    unit = "clips"
    endings = (*ANIMATIONS, ".png")

    def sides(self) -> tuple[tuple[int, ...], int]:
        height, width, channels = self.prepared.table(self.prepared.training_tables[0]).columns["video"].shape
        return (self.recipe.data.num_frames, height, width), channels

    def patch(self) -> tuple[int, ...]:
        model = self.recipe.model
        return (model.temporal_patch_size, model.patch_size, model.patch_size)

    def _measure(self) -> GeneratorMetadata:
        rows = open_media_source(self.recipe, self.prepared, self.prepared.training_tables[0], is_training=False)
        assert isinstance(rows, VideoRows)
        return super()._measure().model_copy(update={"fps": rows.fps})

    def to_medium(self, x: np.ndarray) -> np.ndarray:
        return denormalise_pixels(x, mode=self.recipe.data.normalise)

    def to_values(self, samples: np.ndarray) -> np.ndarray:
        return normalise_pixels(samples, mode=self.recipe.data.normalise)

    def write(self, made: np.ndarray, path: Path, captions: Sequence[str] | None) -> list[Path]:
        return write_videos(made, self.facts.fps or 8, path, captions=captions)
