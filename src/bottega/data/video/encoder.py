"""Encode a record as a table row with its video: all frames at the target size and frame rate."""

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
# Largest size of the frames of one video, which are in memory while it is prepared.
MAX_VIDEO_BYTES = 2**31
# The number of frames is unknown before decoding, so the array grows by this many bytes, or by a quarter if that is more.
BLOCK_BYTES = 1 << 25


@final
@dataclass(frozen=True)
class VideoEncoder(Encoder):
    """Encode all frames at `fps` (None: the native rate), so that clips can start anywhere and strides can change."""

    size: tuple[int, int]
    """Height and width."""
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
        video, rate = self._encode_array(data, record) if isinstance(data, np.ndarray) else self._encode_file(data)
        row = {"video": video, "fps": [rate], **read_annotations(record, label_field=self.label_field)}
        if self.has_condition:
            row["condition"] = read_condition(record, self.condition_field)
        yield row

    def _encode_file(self, data: bytes | Path) -> tuple[np.ndarray, float]:
        """Return the frames, uint8 `(frames, height, width, channels)`, and their rate per second."""
        rate, frames = decode_frames(data, fps=self.fps, limit=self.limit)
        return self._stack_frames(frames), rate

    def _encode_array(self, video: np.ndarray, record: Record) -> tuple[np.ndarray, float]:
        """Encode an array `(frames, height, width)` or `(..., channels)` like a file; its rate is the field `fps` or `data.fps`."""
        if video.ndim not in (3, 4) or 0 in video.shape:
            raise Unreadable(
                f"an array of shape {video.shape} is not a video; expected (frames, height, width, channels)"
            )
        rate = record.fields.get("fps") or self.fps
        if not isinstance(rate, int | float | np.integer | np.floating) or not rate > 0:
            raise Unreadable("an array of frames needs a frame rate; add a field fps, or set data.fps")
        if self.fps is not None and float(rate) != self.fps:
            num_frames = max(1, round(len(video) * self.fps / float(rate)))
            nearest = np.rint(np.arange(num_frames) * (float(rate) / self.fps)).astype(int)
            frame_indices = np.minimum(nearest, len(video) - 1)
            return self._stack_frames((video[i] for i in frame_indices), num_frames=len(frame_indices)), self.fps
        return self._stack_frames(iter(video), num_frames=len(video)), float(rate)

    def _stack_frames(self, frames: Iterator[np.ndarray], *, num_frames: int | None = None) -> np.ndarray:
        """Resize frames and return them as uint8 `(frames, height, width, channels)`.

        They are written into one growing array, because np.stack of a list takes twice the memory.
        """
        shape = (*self.size, self.channels)
        frame_bytes = math.prod(shape)
        max_frames = MAX_VIDEO_BYTES // frame_bytes
        stacked = np.empty(
            (min(max_frames, max(1, BLOCK_BYTES // frame_bytes) if num_frames is None else num_frames), *shape),
            np.uint8,
        )
        num_stacked = 0
        for frame in frames:
            if num_stacked == max_frames:
                raise Unreadable(
                    f"more than {max_frames:,} frames take over 2 GiB; lower data.fps or data.image_size, or split the video"
                )
            if num_stacked == len(stacked):
                _resize_in_place(
                    stacked, min(max_frames, num_stacked + max(1, BLOCK_BYTES // frame_bytes, num_stacked // 4))
                )
            stacked[num_stacked] = resize_image(
                decode_image(frame, channels=self.channels), self.size, mode=self.resize
            )
            num_stacked += 1
        _resize_in_place(stacked, num_stacked)
        return stacked


def _resize_in_place(frames: np.ndarray, length: int) -> None:
    """Resize in place: the system remaps the pages of a large array without copying. No other reference exists yet."""
    if length != len(frames):
        frames.resize((length, *frames.shape[1:]), refcheck=False)
