"""The tasks `image`, `audio` and `video`: samples of a medium from noise."""

from __future__ import annotations

from typing import Any

from bottega.config.task_spec import TaskSpec
from bottega.core.model_spec import resolve_reference
from bottega.tasks.generation.config import AudioRecipe, ImageRecipe, VideoRecipe


def _prepare(recipe: Any, progress: Any) -> Any:
    from bottega.data.prepare.media import prepare_media

    prepared = prepare_media(recipe, progress=progress)
    if recipe.data.latents:
        # With an autoencoder, and so with a framework; training finds them in the cache.
        spec = next(spec for spec in SPECS if spec.name == recipe.task)
        resolve_reference(spec.open)(recipe, say=progress)
    return prepared


SPECS = tuple(
    TaskSpec(
        name=medium,
        recipe=recipe,
        open=f"bottega.tasks.generation.{medium}:prepare",
        reopen=f"bottega.tasks.generation.{medium}:reopen",
        prepare=_prepare,
        preview=f"bottega.data.{medium}.preview:{medium.capitalize()}Preview",
        files=files,
    )
    for medium, recipe, files in (
        ("image", ImageRecipe, ("images", "idx")),
        ("audio", AudioRecipe, ("audio",)),
        ("video", VideoRecipe, ("video",)),
    )
)
