"""From a record to a row of prepared video: its frames at the wanted size and rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.data.image.decode import decode_image
from bottega.data.image.encoder import read_media_field
from bottega.data.image.resize import ResizeMode, resize_image
from bottega.data.prepare.encoder import Encoder
from bottega.data.records.fields import read_annotations, read_condition
from bottega.data.records.record import Record, Unreadable
from bottega.data.tables.shards import TEXT, Column
from bottega.data.video.decode import LIMITS, Limits, decode_frames

VIDEO_FIELDS = ("video", "mp4", "m4v", "mov", "avi", "mkv", "webm", "mpg", "mpeg", "clip", "frames", "file")
# Kept frames of one video; it is held in memory while it is prepared.
MAX_BYTES = 2**31
# A file does not say how many frames it has, so room for them grows by so many bytes, or by a quarter where that is more.
BLOCK = 1 << 25


@final
@dataclass(frozen=True)
class VideoEncoder(Encoder):
    """All frames are kept at `fps` (None: as they come), so that clips can start anywhere and strides can change."""

    size: tuple[int, int]
    channels: int = 3
    fps: float | None = None
    resize: ResizeMode = "crop"
    field: str | None = None
    label_field: str | None = None
    condition_field: str | None = None
    has_condition: bool = False
    limit: Limits = LIMITS

    @property
    def columns(self) -> dict[str, Column]:
        video = Column("|u1", (*self.size, self.channels), varying=True)
        columns = {"video": video, "fps": Column("<f4", (1,)), "key": TEXT, "label": TEXT, "caption": TEXT}
        if self.has_condition:
            columns["condition"] = Column("<f4", varying=True)
        return columns

    def rows(self, record: Record) -> Iterator[dict[str, Any]]:
        data = read_media_field(record, self.field, names=VIDEO_FIELDS, medium="video")
        video, rate = self._from_array(data, record) if isinstance(data, np.ndarray) else self._from_file(data)
        row = {"video": video, "fps": [rate], **read_annotations(record, label_field=self.label_field)}
        if self.has_condition:
            row["condition"] = read_condition(record, self.condition_field)
        yield row

    def _from_file(self, data: bytes | Path) -> tuple[np.ndarray, float]:
        rate, pictures = decode_frames(data, fps=self.fps, limit=self.limit)
        return self._stacked(pictures), rate

    def _from_array(self, video: np.ndarray, record: Record) -> tuple[np.ndarray, float]:
        """Frames [f, h, w] or [f, h, w, c] as they are; an array knows no times, so its rate is a field or ours."""
        if video.ndim not in (3, 4) or 0 in video.shape:
            raise Unreadable(f"an array of shape {video.shape} is no video: expected [frames, height, width, channels]")
        rate = record.fields.get("fps") or self.fps
        if not isinstance(rate, int | float | np.integer | np.floating) or not rate > 0:
            raise Unreadable("an array of frames needs its rate: a field fps, or data.fps")
        if self.fps is not None and float(rate) != self.fps:
            wanted = max(1, round(len(video) * self.fps / float(rate)))
            nearest = np.rint(np.arange(wanted) * (float(rate) / self.fps)).astype(int)
            chosen = np.minimum(nearest, len(video) - 1)
            return self._stacked((video[i] for i in chosen), count=len(chosen)), self.fps
        return self._stacked(iter(video), count=len(video)), float(rate)

    def _stacked(self, pictures: Iterator[np.ndarray], *, count: int | None = None) -> np.ndarray:
        """uint8 [f, h, w, c]. In one array from the first on: a list and then a stack of it would take twice the 2 GiB."""
        shape = (*self.size, self.channels)
        each = math.prod(shape)
        most = MAX_BYTES // each
        kept = np.empty((min(most, max(1, BLOCK // each) if count is None else count), *shape), np.uint8)
        taken = 0
        for picture in pictures:
            if taken == most:
                raise Unreadable(
                    f"over {most:,} frames take more than 2 GiB; lower data.fps or data.image_size, or cut it"
                )
            if taken == len(kept):
                _make_long(kept, min(most, taken + max(1, BLOCK // each, taken // 4)))
            kept[taken] = resize_image(decode_image(picture, channels=self.channels), self.size, mode=self.resize)
            taken += 1
        _make_long(kept, taken)
        return kept


def _make_long(frames: np.ndarray, length: int) -> None:
    """In place: the system moves the pages of a large block without copying them. Nobody else has seen the array yet."""
    if length != len(frames):
        frames.resize((length, *frames.shape[1:]), refcheck=False)
