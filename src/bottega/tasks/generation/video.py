"""The video branch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np

from bottega.config.recipe import Recipe
from bottega.core.errors import UsageError
from bottega.data.image.augment import denormalise, normalise
from bottega.data.prepare.media import prepare_media
from bottega.data.sources.samples import media_samples
from bottega.data.video.source import VideoRows
from bottega.data.video.write import ANIMATIONS, write_videos
from bottega.tasks.generation.branch import Facts, GenerationBranch, Say
from bottega.tasks.generation.config import VideoRecipe


def prepare(recipe: Recipe, *, say: Say) -> VideoBranch:
    assert isinstance(recipe, VideoRecipe)
    if recipe.model.backbone == "unet":
        raise UsageError("model.backbone: unet is for pictures and mel spectrograms; video takes dit")
    return VideoBranch(recipe, prepare_media(recipe, progress=say)).keep_latents(say)


def reopen(recipe: Recipe, codec: Path, fingerprint: str) -> VideoBranch:
    assert isinstance(recipe, VideoRecipe)
    return VideoBranch(recipe, None, codec=codec, expected=fingerprint)


@final
class VideoBranch(GenerationBranch):
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

    def _measure(self) -> Facts:
        rows = media_samples(self.recipe, self.prepared, self.prepared.training_tables[0], is_training=False)
        assert isinstance(rows, VideoRows)
        return super()._measure().model_copy(update={"fps": rows.fps})

    def medium_of(self, x: np.ndarray) -> np.ndarray:
        return denormalise(x, how=self.recipe.data.normalise)

    def values_of(self, samples: np.ndarray) -> np.ndarray:
        return normalise(samples, how=self.recipe.data.normalise)

    def write(self, made: np.ndarray, path: Path, captions: Sequence[str] | None) -> list[Path]:
        return write_videos(made, self.facts.fps or 8, path, captions=captions)
