"""The recipes of tokenizers: images or sound to a small grid of whole numbers and back."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bottega.config.data import HeldOut
from bottega.config.media import MediaRecipe
from bottega.config.recipe import Model, Samples
from bottega.config.section import Number, Positive
from bottega.data.audio.config import AudioData
from bottega.data.image.config import ImageData

_INPUT = "what becomes tokens: image or audio"
_VALIDATION = "what measures progress: {split: 0.1} or a source"


class TokensModel(Model):
    from_: str | None = Field(None, alias="from", description="weights to start from: an exported run or its folder")
    quantiser: Literal["fsq", "vq"] = Field("fsq", description="finite scalars, or a learned codebook")
    levels: tuple[Positive, ...] = Field(
        (8, 5, 5, 5),
        min_length=1,
        description="fsq: values of each channel; their product is how many tokens there are",
    )
    codebook_size: Positive = Field(1024, gt=1, description="vq: how many tokens there are")
    code_size: Positive = Field(32, description="vq: channels of a token's vector")
    hidden_size: Positive = Field(64, description="channels of the first stage; the last has up to 4 times as many")
    downsample: Literal[2, 4, 8, 16] = Field(8, description="how much smaller the grid of tokens is")
    layers_per_block: Positive = Field(2, description="residual blocks of each stage")
    commitment_weight: Number = Field(0.25, ge=0, description="vq: pull of the encoder towards its token")
    distance: Literal["l1", "l2"] = Field("l1", description="what a reconstruction is measured by")


class ImageTokensData(ImageData):
    # Both, though only images fit here, so that a mistyped one is told what there is.
    input: Literal["image", "audio"] = Field("image", description=_INPUT, json_schema_extra={"enum": ["image"]})
    validation: HeldOut | None = Field(default_factory=lambda: HeldOut(split=0.1), description=_VALIDATION)

    @model_validator(mode="after")
    def _is_image(self) -> ImageTokensData:
        if self.input != "image":
            raise ValueError(f"input: {self.input} has a schema of its own")
        return self


class AudioTokensData(AudioData):
    input: Literal["audio"] = Field("audio", description=_INPUT)
    validation: HeldOut | None = Field(default_factory=lambda: HeldOut(split=0.1), description=_VALIDATION)


class TokensRecipe(MediaRecipe):
    """What the two have in common. Which of them a recipe is, `data.input` says; image where it does not."""

    task: Literal["image_tokens"] = Field("image_tokens", description="images or sounds to tokens and back")
    model: TokensModel = Field(default_factory=TokensModel, description="the model")
    samples: Samples = Field(
        default_factory=lambda: Samples(count=8), description="what comes back of held-out samples while it learns"
    )


class ImageTokensRecipe(TokensRecipe):
    data: ImageTokensData = Field(default_factory=ImageTokensData, description="the data")


class AudioTokensRecipe(TokensRecipe):
    data: AudioTokensData = Field(default_factory=AudioTokensData, description="the data")
