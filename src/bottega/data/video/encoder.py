"""From a record to a row of prepared video: its frames at the wanted size and rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from bottega.data.encoder import Encoder
from bottega.data.image.decode import decode
from bottega.data.image.encoder import descriptions, medium, vector
from bottega.data.image.resize import Mode, resize
from bottega.data.record import Record, Unreadable
from bottega.data.shards import TEXT, Column
from bottega.data.video.decode import LIMITS, Limits, frames

VIDEO_FIELDS = ("video", "mp4", "m4v", "mov", "avi", "mkv", "webm", "mpg", "mpeg", "clip", "frames", "file")
# Kept frames of one video; it is held in memory while it is prepared.
MAX_BYTES = 2**31


@final
@dataclass(frozen=True)
class VideoEncoder(Encoder):
    """All frames are kept at `fps` (None: as they come), so that clips can start anywhere and strides can change."""

    size: tuple[int, int]
    channels: int = 3
    fps: float | None = None
    resize: Mode = "crop"
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
        data = medium(record, self.field, names=VIDEO_FIELDS, what="video")
        video, rate = self._from_array(data, record) if isinstance(data, np.ndarray) else self._from_file(data)
        row = {"video": video, "fps": [rate], **descriptions(record, label_field=self.label_field)}
        if self.has_condition:
            row["condition"] = vector(record, self.condition_field)
        yield row

    def _from_file(self, data: bytes | Path) -> tuple[np.ndarray, float]:
        rate, pictures = frames(data, fps=self.fps, limit=self.limit)
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
            video = video[np.minimum(nearest, len(video) - 1)]
        return self._stacked(iter(video)), float(self.fps or rate)

    def _stacked(self, pictures: Iterator[np.ndarray]) -> np.ndarray:
        most = MAX_BYTES // (self.size[0] * self.size[1] * self.channels)
        kept: list[np.ndarray] = []
        for picture in pictures:
            if len(kept) == most:
                raise Unreadable(
                    f"over {most:,} frames take more than 2 GiB; lower data.fps or data.image_size, or cut it"
                )
            kept.append(resize(decode(picture, channels=self.channels), self.size, mode=self.resize))
        return np.stack(kept)
