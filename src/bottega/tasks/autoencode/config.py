"""Recipes of variational autoencoders of images, audio or video; `data.input` selects the medium, by default image."""

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

_INPUT = "medium: image, audio or video"
_VALIDATION = "validation data: {split: 0.1} or a source"


class VaeModel(Model):
    """An autoencoder with continuous latents; for images it is diffusers' AutoencoderKL."""

    from_: str | None = Field(
        None, alias="from", description="weights to start from: an exported run, or an AutoencoderKL folder"
    )
    hidden_size: Positive = Field(64, description="channels of the first stage; the last has up to 4 times as many")
    latent_channels: Positive = Field(4, description="channels of the latents")
    downsample: Literal[2, 4, 8, 16] = Field(4, description="factor by which the sides of the latents are smaller")
    layers_per_block: Positive = Field(2, description="residual blocks of each stage")
    kl_weight: Number = Field(1e-6, ge=0, description="weight of the KL divergence from a unit normal")
    distance: Literal["l1", "l2"] = Field("l1", description="reconstruction loss: absolute or squared error")


class AudioVaeModel(VaeModel):
    """An autoencoder of mel spectrograms."""

    axes: Literal[1, 2] = Field(2, description="latents of time alone, all bands in each (1), or of time and frequency")


class VideoVaeModel(VaeModel):
    """An autoencoder of video, causal in time."""

    temporal_downsample: Literal[1, 2, 4, 8] = Field(
        1, description="frames per latent frame; the first frame has its own, so clips need a multiple plus 1"
    )


class ImageVaeData(ImageData):
    """Images to encode."""

    # All three media, so that the error for a mistyped one lists them; the validator below accepts image only.
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
    """Audio to encode."""

    input: Literal["audio"] = Field("audio", description=_INPUT)
    validation: HeldOut | None = Field(default_factory=lambda: HeldOut(split=0.1), description=_VALIDATION)


class VideoVaeData(VideoData):
    """Video to encode."""

    input: Literal["video"] = Field("video", description=_INPUT)
    validation: HeldOut | None = Field(default_factory=lambda: HeldOut(split=0.1), description=_VALIDATION)


class VaeRecipe(MediaRecipe):
    """Common base of the recipes of image, audio and video autoencoders."""

    task: Literal["image_vae"] = Field("image_vae", description="images, audio or video to continuous latents and back")
    model: VaeModel = Field(default_factory=VaeModel, description="the model")
    samples: Samples = Field(
        default_factory=lambda: Samples(count=8), description="reconstructions of held-out samples while training"
    )


class ImageVaeRecipe(VaeRecipe):
    """A recipe of an image autoencoder."""

    data: ImageVaeData = Field(default_factory=ImageVaeData, description="the data")


class AudioVaeRecipe(VaeRecipe):
    """A recipe of an audio autoencoder."""

    model: AudioVaeModel = Field(default_factory=AudioVaeModel, description="the model")
    data: AudioVaeData = Field(default_factory=AudioVaeData, description="the data")


class VideoVaeRecipe(VaeRecipe):
    """A recipe of a video autoencoder."""

    model: VideoVaeModel = Field(default_factory=VideoVaeModel, description="the model")
    data: VideoVaeData = Field(default_factory=VideoVaeData, description="the data")
