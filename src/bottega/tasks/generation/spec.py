"""The tasks `image`, `audio` and `video`: samples of a medium from noise."""

from __future__ import annotations

from typing import Any

from bottega.config.task_spec import TaskSpec
from bottega.core.model_spec import resolve_reference
from bottega.tasks.generation.config import AudioRecipe, ImageRecipe, VideoRecipe

OPEN = "bottega.tasks.generation.workload:open_workload"


def _prepare(recipe: Any, progress: Any) -> Any:
    from bottega.data.prepare.media import prepare_media

    prepared = prepare_media(recipe, progress=progress)
    if recipe.data.latents:
        # Encoding needs a framework; training then finds the latents in the cache.
        resolve_reference(OPEN)(recipe, progress=progress)
    return prepared


SPECS = tuple(
    TaskSpec(
        name=medium,
        recipe=recipe,
        open=OPEN,
        reopen="bottega.tasks.generation.workload:reopen_workload",
        prepare=_prepare,
        preview=f"bottega.data.{medium}.preview:{medium.capitalize()}Preview",
        files=files,
        # A UNet is diffusers' own model, and codes and vocoders are computed in torch.
        jax_values={"model.backbone": ("dit",), "model.vocoder": (None,)},
    )
    for medium, recipe, files in (
        ("image", ImageRecipe, ("images", "idx")),
        ("audio", AudioRecipe, ("audio",)),
        ("video", VideoRecipe, ("video",)),
    )
)
