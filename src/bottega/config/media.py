"""Recipe settings that image, audio and video tasks share."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from bottega.config.data import Data, ExactDeduplication
from bottega.config.recipe import Recipe, find_path_problems


class MediaData(Data):
    """Data of images, audio or video."""

    condition_field: str | None = Field(
        None, description="field of a row with the condition; null looks for the usual names"
    )
    deduplicate: ExactDeduplication | None = Field(None, description="drop duplicate samples; null keeps all")
    latents: bool = Field(False, description="with model.vae: compute all latents once before training, and cache them")


class MediaRecipe(Recipe):
    """A recipe over images, audio or video, which needs a source of training data."""

    def find_missing_keys(self) -> list[tuple[str, str]]:
        return super().find_missing_keys() + find_path_problems(self.data) + _find_latents_problems(self)


def _find_latents_problems(recipe: Recipe) -> list[tuple[str, str]]:
    data: Any = recipe.data
    if not data.latents:
        return []
    if getattr(recipe.model, "vae", None) is None:
        return [("data.latents", "needs model.vae to compute latents with; set it, or remove this")]
    if data.augmentation is not None and data.augmentation.enabled:
        return [
            (
                "data.augmentation",
                "augmentation changes samples in each epoch, and data.latents computes them once; keep one",
            )
        ]
    return []
