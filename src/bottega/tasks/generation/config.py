"""The recipes that generate images, sound and video."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bottega.config.media import MediaRecipe
from bottega.config.recipe import Samples
from bottega.config.section import Number, Positive, Probability
from bottega.data.audio.config import AudioData
from bottega.data.image.config import ImageData
from bottega.data.video.config import VideoData
from bottega.models.generator.config import AudioGenerator, Generator, VideoGenerator


class GeneratorSamples(Samples):
    count: Positive = Field(16, description="how many")
    steps: Positive = Field(30, description="steps of the sampler")
    sampler: Literal["euler", "heun", "dpm"] = Field("heun", description="how the steps are taken; heun costs twice")
    guidance: Number = Field(1.0, ge=0, description="how strongly the condition is followed; 1 is plain")
    temperature: Number = Field(1.0, ge=0, description="tokens: below 1 is more likely, 0 always takes the likeliest")
    top_k: Positive | None = Field(None, description="tokens: only the likeliest k; null is all")
    top_p: Probability | None = Field(None, gt=0, description="tokens: only the likeliest that sum to p; null is all")
    prompts: tuple[str, ...] = Field((), description="condition text: what is asked for; empty takes captions")


class GeneratorRecipe(MediaRecipe):
    """A recipe whose model draws samples of the sides that the data has."""

    model: Generator = Field(default_factory=Generator, description="the model")

    def sides(self) -> list[tuple[str, int | None, str]]:
        """(key of a side of a sample, the side, key of what must divide it), as far as the recipe says them."""
        return []

    def contradictions(self) -> list[tuple[str, str, str]]:
        found, model = super().contradictions(), self.model
        if model.backbone != "dit" or model.vae is not None:
            return found
        for name, side, patch in self.sides():
            part = getattr(model, patch)
            if side is not None and side % part:
                fits = ", ".join(str(n) for n in range(1, side + 1) if side % n == 0)
                said = f"patches of {part} do not divide a side of {side} ({name}); {fits} do"
                found.append((f"model.{patch}", name, said))
        return found


class ImageRecipe(GeneratorRecipe):
    task: Literal["image"] = Field("image", description="images from noise")
    model: Generator = Field(default_factory=Generator, description="the model")
    data: ImageData = Field(default_factory=ImageData, description="the data")
    samples: GeneratorSamples = Field(
        default_factory=GeneratorSamples, description="what the model draws while it learns"
    )

    def sides(self) -> list[tuple[str, int | None, str]]:
        return [("data.image_size", self.data.image_size, "patch_size")]


class AudioRecipe(GeneratorRecipe):
    task: Literal["audio"] = Field("audio", description="sound from noise, over mel spectrograms")
    model: AudioGenerator = Field(default_factory=AudioGenerator, description="the model")
    data: AudioData = Field(default_factory=AudioData, description="the data")
    samples: GeneratorSamples = Field(
        default_factory=GeneratorSamples, description="what the model sounds like while it learns"
    )

    def sides(self) -> list[tuple[str, int | None, str]]:
        return [("data.num_mels", self.data.num_mels, "patch_size")] if self.model.axes == 2 else []


class VideoRecipe(GeneratorRecipe):
    task: Literal["video"] = Field("video", description="video from noise")
    model: VideoGenerator = Field(default_factory=VideoGenerator, description="the model")
    data: VideoData = Field(default_factory=VideoData, description="the data")
    samples: GeneratorSamples = Field(
        default_factory=GeneratorSamples, description="what the model shows while it learns"
    )

    def sides(self) -> list[tuple[str, int | None, str]]:
        frames = ("data.num_frames", self.data.num_frames, "temporal_patch_size")
        return [frames, ("data.image_size", self.data.image_size, "patch_size")]
