"""Open the source of a recipe's prepared media: images, audio, video or vectors, with its crop, clip and augmentation."""

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
    """Return the samples of one table. Held-out ones are not augmented, and their clips are fixed.

    `classes` replaces those of the data, for a model trained on other data.
    """
    data: Any = recipe.data
    augmentation = (
        data.augmentation if is_training and data.augmentation is not None and data.augmentation.enabled else None
    )
    rows = prepared.table(table)
    classes = prepared.classes if classes is None else classes
    common_options: dict[str, Any] = {
        "content": f"{prepared.fingerprint} {table}",
        "augmentation": augmentation,
        "seed": recipe.seed,
    }
    if isinstance(data, RoutingData):
        from bottega.data.numbers.vectors import BAYES, VectorRows, read_rules

        texts = read_text_column(rows, "label") if len(classes) else [""]
        labels = classes.ids(texts, keys=read_text_column(rows, "key")) if "" not in texts else None
        # The Bayes accuracy is used in evaluation only.
        bayes = rows.values(BAYES) if BAYES in rows.columns and not is_training else None
        return VectorRows(rows, labels=labels, rules=read_rules(rows), bayes=bayes, **common_options)
    assert isinstance(recipe.data, MediaData), "text is opened elsewhere"
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
            **common_options,
        )
    options: dict[str, Any] = {
        "classes": classes,
        "condition": condition,
        "normalise": data.normalise,
        **common_options,
    }
    if isinstance(data, VideoData):
        from bottega.data.video.source import VideoRows

        clip: Any = data.clip if is_training or data.clip != "random" else "centre"
        return VideoRows(rows, num_frames=data.num_frames, stride=data.stride, clip=clip, **options)
    from bottega.data.image.source import ImageRows

    return ImageRows(rows, load_image_encoder(prepared), **options)


def fit_mel_processor(
    recipe: Recipe, prepared: PreparedData, *, multiple: int = 1, low: float = 0.0, high: float | None = None
) -> MelProcessor:
    """Fit the mel spectrogram of a recipe's audio to the training clips before augmentation.

    The bands reach from `low` to `high` hertz; None is half the sample rate. The number of frames is rounded up to a
    multiple of `multiple`, such as a patch size.
    """
    from bottega.data.audio.mel import fit_mel_processor as fit_to_source
    from bottega.data.audio.spectrogram import MelSpectrogram

    data: Any = recipe.data
    rate, tables = int(prepared.metadata["sample_rate"]), prepared.training_tables
    sizes = {"fft_size": data.fft_size, "hop_size": data.hop_size, "num_mels": data.num_mels}
    mel = MelSpectrogram(sample_rate=rate, **sizes, low=low, high=high)

    def open_clips(recipe: Recipe) -> list[Any]:
        return [open_media_source(recipe, prepared, table, is_training=False) for table in tables]

    clip_samples = max(rows.num_samples for rows in open_clips(recipe))
    clips = Concat(open_clips(_with_length(recipe, clip_samples / rate)))
    return fit_to_source(clips, mel, num_samples=clip_samples, multiple=multiple)


def with_processor_length(recipe: R, processor: MelProcessor) -> R:
    """Return the recipe with clips as long as the processor's; otherwise held-out clips would keep their own lengths."""
    return _with_length(recipe, processor.num_samples / processor.mel.sample_rate)


def _with_length(recipe: R, seconds: float) -> R:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"seconds": seconds})})


def load_image_encoder(prepared: PreparedData) -> ImageEncoder:
    """Return the encoder that wrote the tables, which also decodes them."""
    from bottega.data.image.encoder import ImageEncoder

    fields = prepared.metadata["encoder"]
    # JSON turned tuples into lists.
    size, buckets = fields["size"], fields["buckets"]
    tuple_fields = {
        "size": tuple(size) if size is not None else None,
        "buckets": tuple(map(tuple, buckets)) if buckets is not None else None,
    }
    return ImageEncoder(**{**fields, **tuple_fields})


def decode_image(prepared: PreparedData, row: dict[str, Any]) -> np.ndarray:
    """Return the pixels of a row, stored decoded or encoded: uint8 (height, width, channels)."""
    bucket = int(np.ravel(row["bucket"])[0]) if "bucket" in row else 0
    stored = row["image"]
    return (
        np.asarray(stored)
        if isinstance(stored, np.ndarray)
        else load_image_encoder(prepared).decode_row(stored, bucket)
    )
