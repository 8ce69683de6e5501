"""The image branch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np

from bottega.config.recipe import Recipe
from bottega.core.errors import UsageError
from bottega.data.image.augment import denormalise, normalise
from bottega.data.image.write import FORMATS, write_images
from bottega.data.prepare.media import prepare_media
from bottega.data.sources.samples import image_encoder
from bottega.tasks.generation.branch import GenerationBranch, Say
from bottega.tasks.generation.config import ImageRecipe


def prepare(recipe: Recipe, *, say: Say) -> ImageBranch:
    assert isinstance(recipe, ImageRecipe)
    if recipe.data.buckets is not None:
        raise UsageError("data.buckets: a generator makes pictures of one shape; leave it out")
    return ImageBranch(recipe, prepare_media(recipe, progress=say)).keep_latents(say)


def reopen(recipe: Recipe, codec: Path, fingerprint: str) -> ImageBranch:
    assert isinstance(recipe, ImageRecipe)
    return ImageBranch(recipe, None, codec=codec, expected=fingerprint)


@final
class ImageBranch(GenerationBranch):
    key = medium = "image"
    recipe: ImageRecipe
    unit = "images"
    endings = tuple(FORMATS)

    def sides(self) -> tuple[tuple[int, ...], int]:
        height, width, channels = image_encoder(self.prepared).shape(0)
        return (height, width), channels

    def medium_of(self, x: np.ndarray) -> np.ndarray:
        return denormalise(x, how=self.recipe.data.normalise)

    def values_of(self, samples: np.ndarray) -> np.ndarray:
        return normalise(samples, how=self.recipe.data.normalise)

    def write(self, made: np.ndarray, path: Path, captions: Sequence[str] | None) -> list[Path]:
        return write_images(made, path, captions=captions)
