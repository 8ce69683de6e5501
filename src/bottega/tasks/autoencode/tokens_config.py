"""Recipes of tokenizers: autoencoders of images or audio with discrete codes; `data.input` selects the medium."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bottega.config.data import HeldOut
from bottega.config.media import MediaRecipe
from bottega.config.recipe import Model, Samples
from bottega.config.section import Number, Positive
from bottega.data.audio.config import AudioData
from bottega.data.image.config import ImageData

_INPUT = "medium: image or audio"
_VALIDATION = "validation data: {split: 0.1} or a source"


class TokensModel(Model):
    """An autoencoder with a quantiser: finite scalar quantisation (FSQ) or a learned codebook (VQ)."""

    from_: str | None = Field(None, alias="from", description="weights to start from: an exported run or its folder")
    quantiser: Literal["fsq", "vq"] = Field("fsq", description="finite scalar quantisation, or a learned codebook")
    levels: tuple[Positive, ...] = Field(
        (8, 5, 5, 5),
        min_length=1,
        description="fsq: levels of each channel; their product is the size of the vocabulary",
    )
    codebook_size: Positive = Field(1024, gt=1, description="vq: size of the vocabulary")
    code_size: Positive = Field(32, description="vq: channels of a token's vector")
    hidden_size: Positive = Field(64, description="channels of the first stage; the last has up to 4 times as many")
    downsample: Literal[2, 4, 8, 16] = Field(8, description="factor by which the sides of the token grid are smaller")
    layers_per_block: Positive = Field(2, description="residual blocks of each stage")
    commitment_weight: Number = Field(0.25, ge=0, description="vq: weight of the commitment loss")
    distance: Literal["l1", "l2"] = Field("l1", description="reconstruction loss: absolute or squared error")


class ImageTokensData(ImageData):
    """Images to tokenise."""

    # Both media, so that the error for a mistyped one lists them; the validator below accepts image only.
    input: Literal["image", "audio"] = Field("image", description=_INPUT, json_schema_extra={"enum": ["image"]})
    validation: HeldOut | None = Field(default_factory=lambda: HeldOut(split=0.1), description=_VALIDATION)

    @model_validator(mode="after")
    def _is_image(self) -> ImageTokensData:
        if self.input != "image":
            raise ValueError(f"input: {self.input} has a schema of its own")
        return self


class AudioTokensData(AudioData):
    """Audio to tokenise."""

    input: Literal["audio"] = Field("audio", description=_INPUT)
    validation: HeldOut | None = Field(default_factory=lambda: HeldOut(split=0.1), description=_VALIDATION)


class TokensRecipe(MediaRecipe):
    """Common base of the recipes of image and audio tokenizers; `data.input` selects one, by default image."""

    task: Literal["image_tokens"] = Field("image_tokens", description="images or audio to tokens and back")
    model: TokensModel = Field(default_factory=TokensModel, description="the model")
    samples: Samples = Field(
        default_factory=lambda: Samples(count=8), description="reconstructions of held-out samples while training"
    )


class ImageTokensRecipe(TokensRecipe):
    """A recipe of an image tokenizer."""

    data: ImageTokensData = Field(default_factory=ImageTokensData, description="the data")


class AudioTokensRecipe(TokensRecipe):
    """A recipe of an audio tokenizer."""

    data: AudioTokensData = Field(default_factory=AudioTokensData, description="the data")
