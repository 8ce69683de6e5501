"""The `data` section of images."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bottega.config.media import MediaData
from bottega.config.section import Positive, Probability, Section


class ImageAugmentation(Section):
    enabled: bool = Field(True, description="whether it is applied")
    crop: Probability = Field(0.0, description="largest share of the side that a random crop removes")
    flip: bool = Field(False, description="mirror half of the images")
    colour_jitter: Probability = Field(0.0, description="largest change of brightness, contrast and saturation")


class ImageData(MediaData):
    image_size: Positive | None = Field(None, le=8192, description="side in pixels; null is as in the data")
    channels: Literal[1, 3] | None = Field(None, description="1 grey, 3 colour; null is as in the data")
    resize: Literal["crop", "pad", "stretch"] = Field(
        "crop", description="to the wanted shape: cut what is over, fill what is missing, or distort"
    )
    buckets: Positive | None = Field(
        None, description="so many shapes of about image_size^2 pixels, each batch of one; null is one square"
    )
    normalise: Literal["symmetric", "unit", "standard"] = Field(
        "symmetric", description="values from -1 to 1, from 0 to 1, or by ImageNet's mean and deviation"
    )
    store: Literal["auto", "decoded", "encoded"] = Field(
        "auto", description="prepared as pixels, or as files decoded when served; auto is pixels up to 2 GiB"
    )
    augmentation: ImageAugmentation | None = Field(None, description="changed copies of the training images")
