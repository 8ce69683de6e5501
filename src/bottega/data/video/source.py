"""Prepared video as samples: a clip of each, normalised, and augmented for training."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any, Literal, final

import numpy as np

from bottega.core.noise import numpy_generator
from bottega.data.image.augment import Normalisation, augment_images, normalise_pixels
from bottega.data.image.config import ImageAugmentation
from bottega.data.sources.source import Source
from bottega.data.tables.classes import Classes, ConditionKind, Conditions
from bottega.data.tables.shards import Table

ClipPosition = Literal["random", "start", "centre"]


@final
class VideoRows(Source):
    """Samples with `video`, float32 `(batch, frames, height, width, channels)`, `condition` `(batch, d)` and `fps`.

    With classes also `label`, int32 `(batch,)`. `fps` is an int32 scalar: the median prepared rate over the stride, rounded.
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
        condition: ConditionKind = "none",
        normalise: Normalisation = "symmetric",
        augmentation: ImageAugmentation | None = None,
        seed: int = 0,
    ) -> None:
        """`content` is the hash of the files that the table was made from; `clip` is "random" for training only."""
        self.table, self.content = table, content
        self.num_frames, self.stride, self.clip = num_frames, stride, clip
        self.normalise, self.augmentation, self.seed = normalise, augmentation, seed
        self.conditions = Conditions(table, condition, classes=classes)

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def fps(self) -> int:
        """Frames per second of a sample."""
        rates = self.table.values("fps")
        return max(1, round(float(np.median(rates)) / self.stride)) if len(rates) else 1

    def rows(self, index: np.ndarray, epoch: np.ndarray) -> dict[str, Any]:
        shape = (len(index), self.num_frames, *self.table.columns["video"].shape)
        pixels = np.empty(shape, dtype=np.uint8)
        for row, (sample_index, sample_epoch) in enumerate(zip(index.tolist(), epoch.tolist(), strict=True)):
            frames = self.frame_indices(sample_index, sample_epoch)
            pixels[row] = self.table.row("video", sample_index)[frames]
        if self.augmentation is not None:
            pixels = augment_images(pixels, self.augmentation, seed=self.seed, epoch=epoch, index=index)
        rows = {"video": normalise_pixels(pixels, mode=self.normalise), "fps": np.array(self.fps, dtype=np.int32)}
        return {**rows, **self.conditions.rows(index)}

    def frame_indices(self, index: int, epoch: int) -> np.ndarray:
        """Return the indices `(num_frames,)` of the frames that sample `index` has in `epoch`."""
        return sample_frame_indices(
            int(self._lengths[index]),
            num_frames=self.num_frames,
            stride=self.stride,
            position=self.clip,
            seed=self.seed,
            epoch=epoch,
            index=index,
        )

    @property
    def fingerprint(self) -> str:
        options = self.augmentation.model_dump_json() if self.augmentation is not None else None
        names = self.conditions.classes.names if self.conditions.classes is not None else None
        clip = (self.num_frames, self.stride, self.clip, self.seed if options or self.clip == "random" else None)
        parts = (self.content, len(self), clip, names, self.conditions.kind, self.normalise, options)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def describe(self, index: int, epoch: int) -> str:
        height, width, channels = self.table.columns["video"].shape
        frames, rate = self.frame_indices(index, epoch), float(self.table.row("fps", index)[0])
        lines = [
            f"video {index} of {len(self)}: {self.table.row('key', index)}, {height} x {width} x {channels}",
            f"frames {frames[0]} to {frames[-1]} of {self._lengths[index]}, at {rate:g} per second",
            *self.conditions.describe(index),
        ]
        caption = self.table.row("caption", index)
        return "\n".join([*lines, caption] if caption else lines)

    @cached_property
    def _lengths(self) -> np.ndarray:
        return self.table.lengths("video")


def sample_frame_indices(
    length: int, *, num_frames: int, stride: int, position: ClipPosition, seed: int = 0, epoch: int = 0, index: int = 0
) -> np.ndarray:
    """Return the frame indices `(num_frames,)` of a clip of a video of `length` frames.

    A random start is a function of (seed, epoch, index). A video that is too short is padded by repeating its last
    frame. Repeating the whole video would add a jump in the motion, which no real video has.
    """
    excess = max(0, length - ((num_frames - 1) * stride + 1))
    if position == "random":
        start = int(numpy_generator(seed, "video clip", epoch, index).integers(excess + 1))
    else:
        start = excess // 2 if position == "centre" else 0
    return np.minimum(start + stride * np.arange(num_frames), length - 1)
