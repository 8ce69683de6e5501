"""The recipes that generate images, sound and video."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from bottega.config.data import Data
from bottega.config.generator import AudioGenerator, Generator, VideoGenerator
from bottega.config.recipe import Recipe, Samples, path_problems
from bottega.config.section import Number, Positive, Probability, Section


class GeneratorSamples(Samples):
    count: Positive = Field(16, description="how many")
    steps: Positive = Field(30, description="steps of the sampler")
    sampler: Literal["euler", "heun", "dpm"] = Field("heun", description="how the steps are taken; heun costs twice")
    guidance: Number = Field(1.0, ge=0, description="how strongly the condition is followed; 1 is plain")
    temperature: Number = Field(1.0, ge=0, description="tokens: below 1 is more likely, 0 always takes the likeliest")
    top_k: Positive | None = Field(None, description="tokens: only the likeliest k; null is all")
    top_p: Probability | None = Field(None, gt=0, description="tokens: only the likeliest that sum to p; null is all")
    prompts: tuple[str, ...] = Field((), description="condition text: what is asked for; empty takes captions")


class MediaData(Data):
    condition_field: str | None = Field(None, description="which field of a row is the condition; null finds it")
    latents: bool = Field(False, description="with model.vae: compute all latents once, before training, and keep them")


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


class AudioAugmentation(Section):
    enabled: bool = Field(True, description="whether it is applied")
    noise: Number = Field(0.0, ge=0, description="standard deviation of added noise, as a share of the sound's own")
    gain: Number = Field(0.0, ge=0, description="largest change of loudness, in decibels")
    time_mask: Probability = Field(0.0, description="largest share of the time that is silenced")
    frequency_mask: Probability = Field(0.0, description="largest share of the bands that is silenced")


class AudioData(MediaData):
    sample_rate: Positive | None = Field(
        None, ge=1000, le=768_000, description="samples a second; null is as in the data"
    )
    seconds: Number | None = Field(
        None, gt=0, le=3600, description="length of an example; null is the longest in the data"
    )
    crop: Literal["random", "start", "centre"] = Field("random", description="which part of a longer sound is heard")
    normalise: Literal["none", "peak", "loudness"] = Field(
        "none", description="largest value 0.95, or loudness -23 LUFS (ITU-R BS.1770)"
    )
    num_mels: Positive = Field(64, le=2048, description="bands of the mel spectrogram")
    fft_size: Positive = Field(1024, ge=2, le=1 << 16, description="samples in a window")
    hop_size: Positive = Field(256, description="samples between windows")
    augmentation: AudioAugmentation | None = Field(None, description="changed copies of the training sounds")

    @model_validator(mode="after")
    def _overlaps(self) -> Self:
        if self.hop_size > self.fft_size // 2:
            raise ValueError(
                f"hop_size: {self.hop_size} is more than half of fft_size {self.fft_size}, so windows would lose sound "
                f"between them; {max(1, self.fft_size // 4)} is usual"
            )
        return self


class VideoData(ImageData):
    num_frames: Positive = Field(16, le=10_000, description="frames in an example")
    fps: Number | None = Field(
        None, gt=0, le=240, description="frames a second after temporal sampling; null is as in the data"
    )
    stride: Positive = Field(1, description="take every so many frames, after fps")
    clip: Literal["random", "start", "centre"] = Field("random", description="which frames of a longer video are seen")


class MediaRecipe(Recipe):
    """What they have in common: they need a source."""

    def missing(self) -> list[tuple[str, str]]:
        return super().missing() + path_problems(self.data) + _latents_problems(self)

    def sides(self) -> list[tuple[str, int | None, str]]:
        """(key of a side of a sample, the side, key of what must divide it), as far as the recipe says them."""
        return []

    def contradictions(self) -> list[tuple[str, str, str]]:
        found, model = super().contradictions(), self.model
        if not isinstance(model, Generator) or model.backbone != "dit" or model.vae is not None:
            return found
        for name, side, patch in self.sides():
            part = getattr(model, patch)
            if side is not None and side % part:
                fits = ", ".join(str(n) for n in range(1, side + 1) if side % n == 0)
                said = f"patches of {part} do not divide a side of {side} ({name}); {fits} do"
                found.append((f"model.{patch}", name, said))
        return found


def _latents_problems(recipe: Recipe) -> list[tuple[str, str]]:
    data: Any = recipe.data
    if not data.latents:
        return []
    if getattr(recipe.model, "vae", None) is None:
        return [("data.latents", "true, and there is no model.vae to compute them with; leave it out")]
    if data.augmentation is not None and data.augmentation.enabled:
        return [("data.augmentation", "changes samples each time, and data.latents computes them once; keep one")]
    return []


class ImageRecipe(MediaRecipe):
    task: Literal["image"] = Field("image", description="images from noise")
    model: Generator = Field(default_factory=Generator, description="the model")
    data: ImageData = Field(default_factory=ImageData, description="the data")
    samples: GeneratorSamples = Field(
        default_factory=GeneratorSamples, description="what the model draws while it learns"
    )

    def sides(self) -> list[tuple[str, int | None, str]]:
        return [("data.image_size", self.data.image_size, "patch_size")]


class AudioRecipe(MediaRecipe):
    task: Literal["audio"] = Field("audio", description="sound from noise, over mel spectrograms")
    model: AudioGenerator = Field(default_factory=AudioGenerator, description="the model")
    data: AudioData = Field(default_factory=AudioData, description="the data")
    samples: GeneratorSamples = Field(
        default_factory=GeneratorSamples, description="what the model sounds like while it learns"
    )

    def sides(self) -> list[tuple[str, int | None, str]]:
        return [("data.num_mels", self.data.num_mels, "patch_size")] if self.model.axes == 2 else []


class VideoRecipe(MediaRecipe):
    task: Literal["video"] = Field("video", description="video from noise")
    model: VideoGenerator = Field(default_factory=VideoGenerator, description="the model")
    data: VideoData = Field(default_factory=VideoData, description="the data")
    samples: GeneratorSamples = Field(
        default_factory=GeneratorSamples, description="what the model shows while it learns"
    )

    def sides(self) -> list[tuple[str, int | None, str]]:
        frames = ("data.num_frames", self.data.num_frames, "temporal_patch_size")
        return [frames, ("data.image_size", self.data.image_size, "patch_size")]
