"""Prepared media as samples: which source reads the tables of a recipe, with what it says of size, clip and change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bottega.data.classes import Conditions
from bottega.data.prepare.prepared import Prepared
from bottega.data.source import Source
from bottega.schema.media import AudioRecipe, MediaRecipe, VideoRecipe
from bottega.schema.recipe import Recipe
from bottega.schema.routing import RoutingRecipe

if TYPE_CHECKING:
    from bottega.data.image.encoder import ImageEncoder


def media_samples(recipe: Recipe, prepared: Prepared, table: str, *, is_training: bool) -> Source:
    """The samples of one table. Held-out ones are never changed, and their clips are always the same."""
    data: Any = recipe.data
    changes = data.augmentation if is_training and data.augmentation is not None and data.augmentation.enabled else None
    rows, classes = prepared.table(table), prepared.classes
    common: dict[str, Any] = {
        "content": f"{prepared.fingerprint} {table}",
        "augmentation": changes,
        "seed": recipe.seed,
    }
    if isinstance(recipe, RoutingRecipe):
        from bottega.data.vectors import VectorRows

        return VectorRows(rows, labels=prepared.labels(table), **common)
    assert isinstance(recipe, MediaRecipe), "text has sources of its own"
    condition: Any = getattr(recipe.model, "condition", "none")
    if isinstance(recipe, AudioRecipe):
        from bottega.data.audio.source import AudioRows

        return AudioRows(
            rows,
            sample_rate=int(prepared.meta["sample_rate"]),
            seconds=data.seconds,
            crop=data.crop,
            train=is_training,
            conditions=Conditions(rows, condition, classes=classes),
            **common,
        )
    seen: dict[str, Any] = {"classes": classes, "condition": condition, "normalise": data.normalise, **common}
    if isinstance(recipe, VideoRecipe):
        from bottega.data.video.source import VideoRows

        clip: Any = data.clip if is_training or data.clip != "random" else "centre"
        return VideoRows(rows, num_frames=data.num_frames, stride=data.stride, clip=clip, **seen)
    from bottega.data.image.source import ImageRows

    return ImageRows(rows, image_encoder(prepared), **seen)


def image_encoder(prepared: Prepared) -> ImageEncoder:
    """The one that wrote the tables, which also reads them."""
    from bottega.data.image.encoder import ImageEncoder

    fields = prepared.meta["encoder"]
    # JSON knows only lists.
    size, buckets = fields["size"], fields["buckets"]
    tuples = {
        "size": tuple(size) if size is not None else None,
        "buckets": tuple(map(tuple, buckets)) if buckets is not None else None,
    }
    return ImageEncoder(**{**fields, **tuples})


def picture(prepared: Prepared, row: dict[str, Any]) -> np.ndarray:
    """The pixels of a row, however they are stored: uint8 [h, w, c]."""
    bucket = int(np.ravel(row["bucket"])[0]) if "bucket" in row else 0
    stored = row["image"]
    return np.asarray(stored) if isinstance(stored, np.ndarray) else image_encoder(prepared).pixels(stored, bucket)
