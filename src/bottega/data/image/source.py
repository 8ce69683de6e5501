"""Prepared images as samples: normalised, and augmented for training."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any, final

import numpy as np

from bottega.data.image.augment import Normalisation, augment_images, normalise_pixels
from bottega.data.image.config import ImageAugmentation
from bottega.data.image.encoder import ImageEncoder
from bottega.data.sources.source import Source
from bottega.data.tables.classes import Classes, ConditionKind, Conditions
from bottega.data.tables.shards import Table


@final
class ImageRows(Source):
    """Samples with `image`, float32 `(batch, height, width, channels)`, and `condition`, float32 `(batch, d)`.

    With classes also `label`, int32 `(batch,)`. With buckets, all samples of one call must be of one bucket.
    """

    def __init__(
        self,
        table: Table,
        encoder: ImageEncoder,
        *,
        content: str,
        classes: Classes | None = None,
        condition: ConditionKind = "none",
        normalise: Normalisation = "symmetric",
        augmentation: ImageAugmentation | None = None,
        seed: int = 0,
    ) -> None:
        """`content` is the hash of the files that the table was made from; `augmentation` is for training only."""
        self.table, self.encoder, self.content = table, encoder, content
        self.normalise, self.augmentation, self.seed = normalise, augmentation, seed
        self.conditions = Conditions(table, condition, classes=classes)

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def buckets(self) -> np.ndarray:
        """The bucket of each sample, int32 `(samples,)`."""
        if "bucket" not in self.table.columns:
            return np.zeros(len(self), dtype=np.int32)
        return np.array(self.table.values("bucket")[:, 0], dtype=np.int32)

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        pixels = self.load_pixels(index)
        if self.augmentation is not None:
            pixels = augment_images(pixels, self.augmentation, seed=self.seed, epoch=epoch, index=index)
        return {"image": normalise_pixels(pixels, mode=self.normalise), **self.conditions.rows(index)}

    def load_pixels(self, index: np.ndarray) -> np.ndarray:
        """Return a copy of the prepared pixels, uint8 `(batch, height, width, channels)`."""
        if self.encoder.store == "decoded" and self.encoder.buckets is None:
            return self.table.gather("image", index)
        bucket = int(self.buckets[index[0]]) if len(index) else 0
        assert (self.buckets[index] == bucket).all(), "the images of a batch are of several buckets"
        pixels = np.empty((len(index), *self.encoder.bucket_shape(bucket)), dtype=np.uint8)
        for row, sample_index in enumerate(index.tolist()):
            pixels[row] = self.encoder.decode_row(self.table.row("image", sample_index), bucket)
        return pixels

    @property
    def fingerprint(self) -> str:
        options = self.augmentation.model_dump_json() if self.augmentation is not None else None
        names = self.conditions.classes.names if self.conditions.classes is not None else None
        parts = (self.content, len(self), self.encoder, names, self.conditions.kind, self.normalise, options)
        return hashlib.sha256(repr((*parts, self.seed if options else None)).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        height, width, channels = self.encoder.bucket_shape(int(self.buckets[index]))
        head = f"image {index} of {len(self)}: {self.table.row('key', index)}, {height} x {width} x {channels}"
        caption = self.table.row("caption", index)
        return "\n".join((head, *self.conditions.describe(index), *([caption] if caption else [])))
