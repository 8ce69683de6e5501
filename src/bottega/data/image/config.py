"""The `data` section of image recipes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bottega.config.media import MediaData
from bottega.config.section import Positive, Probability, Section


class ImageAugmentation(Section):
    """Options of `data.augmentation` for images and video."""

    enabled: bool = Field(True, description="whether augmentation is on")
    crop: Probability = Field(0.0, description="largest fraction of a side that a random crop removes")
    flip: bool = Field(False, description="mirror half of the images horizontally")
    colour_jitter: Probability = Field(
        0.0, description="largest relative change of brightness, contrast and saturation"
    )


class ImageData(MediaData):
    """The `data` section of tasks that read images."""

    image_size: Positive | None = Field(None, le=8192, description="side in pixels; null: as in the data")
    channels: Literal[1, 3] | None = Field(None, description="1 grey, 3 colour; null: as in the data")
    resize: Literal["crop", "pad", "stretch"] = Field(
        "crop", description="how images get the target shape: crop, pad with black, or stretch"
    )
    buckets: Positive | None = Field(
        None, description="number of aspect-ratio buckets of about image_size^2 pixels; null: one square"
    )
    normalise: Literal["symmetric", "unit", "standard"] = Field(
        "symmetric", description="scale to -1 to 1, to 0 to 1, or by ImageNet's mean and standard deviation"
    )
    store: Literal["auto", "decoded", "encoded"] = Field(
        "auto", description="store pixels, or files decoded for each batch; auto: pixels up to 2 GiB"
    )
    augmentation: ImageAugmentation | None = Field(None, description="augmentation of the training images")
