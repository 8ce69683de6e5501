"""What recipes of images, sound and video share."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from bottega.config.data import Data
from bottega.config.recipe import Recipe, find_path_problems


class MediaData(Data):
    condition_field: str | None = Field(None, description="which field of a row is the condition; null finds it")
    latents: bool = Field(False, description="with model.vae: compute all latents once, before training, and keep them")


class MediaRecipe(Recipe):
    """A recipe that needs a source of samples."""

    def find_missing_keys(self) -> list[tuple[str, str]]:
        return super().find_missing_keys() + find_path_problems(self.data) + _latents_problems(self)


def _latents_problems(recipe: Recipe) -> list[tuple[str, str]]:
    data: Any = recipe.data
    if not data.latents:
        return []
    if getattr(recipe.model, "vae", None) is None:
        return [("data.latents", "true, and there is no model.vae to compute them with; leave it out")]
    if data.augmentation is not None and data.augmentation.enabled:
        return [("data.augmentation", "changes samples each time, and data.latents computes them once; keep one")]
    return []
