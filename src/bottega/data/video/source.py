"""Prepared video as samples: a clip of each, changed while training, as the numbers a model sees."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any, final

import numpy as np

from bottega.data.image.augment import Normalisation, augment_images, normalise_pixels
from bottega.data.image.config import ImageAugmentation
from bottega.data.sources.source import Source
from bottega.data.tables.classes import Classes, Conditions, Kind
from bottega.data.tables.shards import Table
from bottega.data.video.sampling import ClipPosition, sample_frame_indices


@final
class VideoRows(Source):
    """video [b, f, h, w, c] and condition [b, d], float32; fps, one int32; label [b], int32, where there are classes.

    fps is that of the frames seen: the prepared rate over the stride, rounded; of several rates the median.
    """

    def __init__(
        self,
        table: Table,
        *,
        content: str,
        num_frames: int,
        stride: int = 1,
        clip: ClipPosition = "random",
        classes: Classes | None = None,
        condition: Kind = "none",
        normalise: Normalisation = "symmetric",
        augmentation: ImageAugmentation | None = None,
        seed: int = 0,
    ) -> None:
        """`content` is the hash of what the table was made from. Where nothing is learned, clip is not random."""
        self.table, self.content = table, content
        self.num_frames, self.stride, self.clip = num_frames, stride, clip
        self.normalise, self.augmentation, self.seed = normalise, augmentation, seed
        self.conditions = Conditions(table, condition, classes=classes)

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def fps(self) -> int:
        rates = self.table.values("fps")
        return max(1, round(float(np.median(rates)) / self.stride)) if len(rates) else 1

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        shape = (len(index), self.num_frames, *self.table.columns["video"].shape)
        pixels = np.empty(shape, dtype=np.uint8)
        for place, (number, at) in enumerate(zip(index.tolist(), epoch.tolist(), strict=True)):
            pixels[place] = self.table.row("video", number)[self.frame_indices(number, at)]
        if self.augmentation is not None:
            pixels = augment_images(pixels, self.augmentation, seed=self.seed, epoch=epoch, index=index)
        rows = {"video": normalise_pixels(pixels, mode=self.normalise), "fps": np.array(self.fps, dtype=np.int32)}
        return {**rows, **self.conditions.rows(index)}

    def frame_indices(self, number: int, epoch: int) -> np.ndarray:
        """The frames of a sample that are seen in an epoch."""
        return sample_frame_indices(
            int(self._lengths[number]),
            num_frames=self.num_frames,
            stride=self.stride,
            position=self.clip,
            seed=self.seed,
            epoch=epoch,
            index=number,
        )

    @property
    def fingerprint(self) -> str:
        options = self.augmentation.model_dump_json() if self.augmentation is not None else None
        names = self.conditions.classes.names if self.conditions.classes is not None else None
        seen = (self.num_frames, self.stride, self.clip, self.seed if options or self.clip == "random" else None)
        parts = (self.content, len(self), seen, names, self.conditions.kind, self.normalise, options)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        height, width, channels = self.table.columns["video"].shape
        chosen, rate = self.frame_indices(index, epoch), float(self.table.row("fps", index)[0])
        lines = [
            f"video {index} of {len(self)}: {self.table.row('key', index)}, {height} x {width} x {channels}",
            f"frames {chosen[0]} to {chosen[-1]} of {self._lengths[index]}, at {rate:g} a second",
            *self.conditions.describe(index),
        ]
        caption = self.table.row("caption", index)
        return "\n".join([*lines, caption] if caption else lines)

    @cached_property
    def _lengths(self) -> np.ndarray:
        return self.table.lengths("video")
