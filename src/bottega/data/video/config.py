"""The `data` section of video."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bottega.config.section import Number, Positive
from bottega.data.image.config import ImageData


class VideoData(ImageData):
    num_frames: Positive = Field(16, le=10_000, description="frames in an example")
    fps: Number | None = Field(
        None, gt=0, le=240, description="frames a second after temporal sampling; null is as in the data"
    )
    stride: Positive = Field(1, description="take every so many frames, after fps")
    clip: Literal["random", "start", "centre"] = Field("random", description="which frames of a longer video are seen")
