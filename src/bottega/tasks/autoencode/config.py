"""The recipes of autoencoders: images, sound or video to smooth latents and back.

Which of the three a recipe is, `data.input` says; image where it does not.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bottega.config.data import HeldOut
from bottega.config.media import MediaRecipe
from bottega.config.recipe import Model, Samples
from bottega.config.section import Number, Positive
from bottega.data.audio.config import AudioData
from bottega.data.image.config import ImageData
from bottega.data.video.config import VideoData

_INPUT = "what is encoded: image, audio or video"
_VALIDATION = "what measures progress: {split: 0.1} or a source"


class VaeModel(Model):
    """An autoencoder with continuous latents; of images it is diffusers' AutoencoderKL."""

    from_: str | None = Field(
        None, alias="from", description="weights to start from: an exported run, or an AutoencoderKL folder"
    )
    hidden_size: Positive = Field(64, description="channels of the first stage; the last has up to 4 times as many")
    latent_channels: Positive = Field(4, description="channels of the latents")
    downsample: Literal[2, 4, 8, 16] = Field(4, description="how much smaller the latents' sides are")
    layers_per_block: Positive = Field(2, description="residual blocks of each stage")
    kl_weight: Number = Field(1e-6, ge=0, description="pull of the latents towards a unit normal")
    distance: Literal["l1", "l2"] = Field("l1", description="what is made small: absolute or squared errors")


class AudioVaeModel(VaeModel):
    axes: Literal[1, 2] = Field(2, description="latents of time alone, all bands in each (1), or of time and frequency")


class VideoVaeModel(VaeModel):
    temporal_downsample: Literal[1, 2, 4, 8] = Field(
        1, description="how many frames become one; the first stays by itself, so 1 more than a multiple are needed"
    )


class ImageVaeData(ImageData):
    # All three, though only images fit here, so that a mistyped one is told what there is.
    input: Literal["image", "audio", "video"] = Field(
        "image", description=_INPUT, json_schema_extra={"enum": ["image"]}
    )
    validation: HeldOut | None = Field(default_factory=lambda: HeldOut(split=0.1), description=_VALIDATION)

    @model_validator(mode="after")
    def _is_image(self) -> ImageVaeData:
        if self.input != "image":
            raise ValueError(f"input: {self.input} has a schema of its own")
        return self


class AudioVaeData(AudioData):
    input: Literal["audio"] = Field("audio", description=_INPUT)
    validation: HeldOut | None = Field(default_factory=lambda: HeldOut(split=0.1), description=_VALIDATION)


class VideoVaeData(VideoData):
    input: Literal["video"] = Field("video", description=_INPUT)
    validation: HeldOut | None = Field(default_factory=lambda: HeldOut(split=0.1), description=_VALIDATION)


class VaeRecipe(MediaRecipe):
    """What the three have in common."""

    task: Literal["image_vae"] = Field("image_vae", description="images, sounds or videos to smooth latents and back")
    model: VaeModel = Field(default_factory=VaeModel, description="the model")
    samples: Samples = Field(
        default_factory=lambda: Samples(count=8), description="what comes back of held-out samples while it learns"
    )


class ImageVaeRecipe(VaeRecipe):
    data: ImageVaeData = Field(default_factory=ImageVaeData, description="the data")


class AudioVaeRecipe(VaeRecipe):
    model: AudioVaeModel = Field(default_factory=AudioVaeModel, description="the model")
    data: AudioVaeData = Field(default_factory=AudioVaeData, description="the data")


class VideoVaeRecipe(VaeRecipe):
    model: VideoVaeModel = Field(default_factory=VideoVaeModel, description="the model")
    data: VideoVaeData = Field(default_factory=VideoVaeData, description="the data")
