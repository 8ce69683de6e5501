"""The image branch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np

from bottega.config.recipe import Recipe
from bottega.core.errors import UsageError
from bottega.data.image.augment import denormalise_pixels, normalise_pixels
from bottega.data.image.write import FORMATS, write_images
from bottega.data.prepare.media import prepare_media
from bottega.data.sources.samples import load_image_encoder
from bottega.tasks.generation.config import ImageRecipe
from bottega.tasks.generation.workload import GenerationWorkload, Say


def prepare(recipe: Recipe, *, say: Say) -> ImageWorkload:
    assert isinstance(recipe, ImageRecipe)
    if recipe.data.buckets is not None:
        raise UsageError("data.buckets: a generator makes pictures of one shape; leave it out")
    return ImageWorkload(recipe, prepare_media(recipe, progress=say)).keep_latents(say)


def reopen(recipe: Recipe, processor: Path, fingerprint: str) -> ImageWorkload:
    assert isinstance(recipe, ImageRecipe)
    return ImageWorkload(recipe, None, processor=processor, expected=fingerprint)


@final
class ImageWorkload(GenerationWorkload):
    key = medium = "image"
    recipe: ImageRecipe
    unit = "images"
    endings = tuple(FORMATS)

    def sides(self) -> tuple[tuple[int, ...], int]:
        height, width, channels = load_image_encoder(self.prepared).bucket_shape(0)
        return (height, width), channels

    def to_medium(self, x: np.ndarray) -> np.ndarray:
        return denormalise_pixels(x, mode=self.recipe.data.normalise)

    def to_values(self, samples: np.ndarray) -> np.ndarray:
        return normalise_pixels(samples, mode=self.recipe.data.normalise)

    def write(self, made: np.ndarray, path: Path, captions: Sequence[str] | None) -> list[Path]:
        return write_images(made, path, captions=captions)
