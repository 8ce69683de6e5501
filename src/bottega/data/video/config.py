"""The `data` section of video recipes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bottega.config.section import Number, Positive
from bottega.data.image.config import ImageData


class VideoData(ImageData):
    """The `data` section of tasks that read video."""

    num_frames: Positive = Field(16, le=10_000, description="frames in a sample")
    fps: Number | None = Field(None, gt=0, le=240, description="frames per second to resample to; null: as in the data")
    stride: Positive = Field(1, description="use every stride-th frame, after resampling to fps")
    clip: Literal["random", "start", "centre"] = Field("random", description="which frames of a longer video are used")
