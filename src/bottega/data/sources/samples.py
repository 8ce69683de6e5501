"""Prepared media as samples: which source reads the tables of a recipe, with what it says of size, clip and change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bottega.config.media import MediaData
from bottega.config.recipe import Recipe
from bottega.data.audio.config import AudioData
from bottega.data.numbers.config import RoutingData
from bottega.data.prepare.prepared import PreparedData
from bottega.data.sources.combine import Concat
from bottega.data.sources.source import Source
from bottega.data.tables.classes import Classes, Conditions, read_text_column
from bottega.data.video.config import VideoData

if TYPE_CHECKING:
    from bottega.data.audio.mel import MelProcessor
    from bottega.data.image.encoder import ImageEncoder

R = TypeVar("R", bound=Recipe)


def open_media_source(
    recipe: Recipe, prepared: PreparedData, table: str, *, is_training: bool, classes: Classes | None = None
) -> Source:
    """The samples of one table. Held-out ones are never changed, and their clips are always the same.

    `classes` are those that a model knows already, where the data is not its own.
    """
    data: Any = recipe.data
    changes = data.augmentation if is_training and data.augmentation is not None and data.augmentation.enabled else None
    rows = prepared.table(table)
    classes = prepared.classes if classes is None else classes
    common: dict[str, Any] = {
        "content": f"{prepared.fingerprint} {table}",
        "augmentation": changes,
        "seed": recipe.seed,
    }
    if isinstance(data, RoutingData):
        from bottega.data.numbers.vectors import BAYES, VectorRows, read_rules

        texts = read_text_column(rows, "label") if len(classes) else [""]
        labels = classes.ids(texts, keys=read_text_column(rows, "key")) if "" not in texts else None
        bayes = (
            rows.values(BAYES) if BAYES in rows.columns and not is_training else None
        )  # it measures, and teaches nothing
        return VectorRows(rows, labels=labels, rules=read_rules(rows), bayes=bayes, **common)
    assert isinstance(recipe.data, MediaData), "text has sources of its own"
    condition: Any = getattr(recipe.model, "condition", "none")
    if isinstance(data, AudioData):
        from bottega.data.audio.source import AudioRows

        return AudioRows(
            rows,
            sample_rate=int(prepared.metadata["sample_rate"]),
            seconds=data.seconds,
            crop=data.crop,
            train=is_training,
            conditions=Conditions(rows, condition, classes=classes),
            **common,
        )
    seen: dict[str, Any] = {"classes": classes, "condition": condition, "normalise": data.normalise, **common}
    if isinstance(data, VideoData):
        from bottega.data.video.source import VideoRows

        clip: Any = data.clip if is_training or data.clip != "random" else "centre"
        return VideoRows(rows, num_frames=data.num_frames, stride=data.stride, clip=clip, **seen)
    from bottega.data.image.source import ImageRows

    return ImageRows(rows, load_image_encoder(prepared), **seen)


def fit_mel_processor(
    recipe: Recipe, prepared: PreparedData, *, multiple: int = 1, low: float = 0.0, high: float | None = None
) -> MelProcessor:
    """How the sounds of a recipe are seen as spectrograms, by the training sounds as they are before any change.

    The bands reach from `low` to `high` hertz; None is half the sample rate.
    """
    from bottega.data.audio.mel import fit_mel_processor
    from bottega.data.audio.spectrogram import MelSpectrogram

    data: Any = recipe.data
    rate, tables = int(prepared.metadata["sample_rate"]), prepared.training_tables
    sizes = {"fft_size": data.fft_size, "hop_size": data.hop_size, "num_mels": data.num_mels}
    mel = MelSpectrogram(sample_rate=rate, **sizes, low=low, high=high)

    def sounds(recipe: Recipe) -> list[Any]:
        return [open_media_source(recipe, prepared, table, is_training=False) for table in tables]

    longest = max(rows.num_samples for rows in sounds(recipe))
    return fit_mel_processor(
        Concat(sounds(_with_length(recipe, longest / rate))), mel, num_samples=longest, multiple=multiple
    )


def with_processor_length(recipe: R, processor: MelProcessor) -> R:
    """The recipe with its sounds as long as the codec's: where that is not said, held-out ones would be as they are."""
    return _with_length(recipe, processor.num_samples / processor.mel.sample_rate)


def _with_length(recipe: R, seconds: float) -> R:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"seconds": seconds})})


def load_image_encoder(prepared: PreparedData) -> ImageEncoder:
    """The one that wrote the tables, which also reads them."""
    from bottega.data.image.encoder import ImageEncoder

    fields = prepared.metadata["encoder"]
    # JSON knows only lists.
    size, buckets = fields["size"], fields["buckets"]
    tuples = {
        "size": tuple(size) if size is not None else None,
        "buckets": tuple(map(tuple, buckets)) if buckets is not None else None,
    }
    return ImageEncoder(**{**fields, **tuples})


def decode_image(prepared: PreparedData, row: dict[str, Any]) -> np.ndarray:
    """The pixels of a row, however they are stored: uint8 [h, w, c]."""
    bucket = int(np.ravel(row["bucket"])[0]) if "bucket" in row else 0
    stored = row["image"]
    return (
        np.asarray(stored)
        if isinstance(stored, np.ndarray)
        else load_image_encoder(prepared).decode_row(stored, bucket)
    )
