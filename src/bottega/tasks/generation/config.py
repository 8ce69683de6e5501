"""The recipes that generate images, sound and video."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bottega.config.media import MediaRecipe
from bottega.config.recipe import Model, Samples
from bottega.config.section import Number, Positive, Probability, Section
from bottega.data.audio.config import AudioData
from bottega.data.image.config import ImageData
from bottega.data.video.config import VideoData
from bottega.models.generator.config import Condition
from bottega.tasks.generation.objectives import ObjectiveName


class TextEncoderOptions(Section):
    """Who reads captions: an encoder from a folder, frozen, or a small one of our own that learns with the rest."""

    from_: str | None = Field(None, alias="from", description="a transformers text encoder with its tokenizer; frozen")
    hidden_size: Positive = Field(128, description="our own: width")
    num_layers: Positive = Field(2, description="our own: blocks")
    vocab_size: Positive = Field(2048, ge=257, description="our own: tokens learnt from the captions, bytes among them")
    max_tokens: Positive | None = Field(
        None, description="captions are cut at so many tokens; null is 32, or what the folder's encoder reads up to 128"
    )


class Generator(Model):
    """A diffusion model over patches of whatever the medium is, diffusers' UNet, or a language model over its codes."""

    from_: str | None = Field(
        None, alias="from", description="weights to start from: a run, or a diffusers UNet folder"
    )
    backbone: Literal["dit", "unet", "tokens"] = Field(
        "dit", description="a diffusion transformer, diffusers' UNet (images), or a language model over codes"
    )
    tokenizer: str | None = Field(
        None, description="tokens: whose codes, such as needs.tokens, or an image_tokens run or its exported folder"
    )
    objective: ObjectiveName = Field("flow", description="flow matching, noise prediction (DDPM), or v-prediction")
    times: Literal["logit_normal", "uniform"] = Field("logit_normal", description="flow: how training times are drawn")
    time_shift: Number | None = Field(
        None, gt=0, description="flow: above 1 looks more where noise is strong, for large samples and films; null is 1"
    )
    noise_schedule: Literal["cosine", "linear", "scaled_linear"] = Field(
        "cosine", description="noise and v: how noise grows over 1,000 steps"
    )
    min_snr: Number | None = Field(None, gt=0, description="noise and v: cap on the weight of clean times, such as 5")
    hidden_size: Positive = Field(256, description="dit, tokens: width; unet: channels of the first stage")
    num_layers: Positive = Field(6, description="dit, tokens: blocks; unet: residual blocks of each stage")
    num_heads: Positive = Field(4, description="attention heads")
    patch_size: Positive = Field(2, description="dit: side of a patch")
    stages: Positive = Field(3, description="unet: how many, each of half the side")
    condition: Condition = Field("class", description="what a sample can be asked for")
    num_classes: Positive | None = Field(None, description="condition class: how many; null counts them in the data")
    condition_size: Positive | None = Field(None, description="condition vector: its width; null finds it in the data")
    condition_dropout: Probability = Field(0.1, description="share trained without the condition, for guidance")
    text: TextEncoderOptions = Field(default_factory=TextEncoderOptions, description="condition text: who reads it")
    vae: str | None = Field(
        None,
        description="train in the latents of this run, such as needs.vae, or of a diffusers AutoencoderKL folder; "
        "null is plain values",
    )


class AudioGenerator(Generator):
    axes: Literal[1, 2] = Field(2, description="patches of time alone, all bands in each (1), or of time and frequency")
    vocoder: str | None = Field(
        None, description="a transformers vocoder's folder for mel to sound; null is Griffin-Lim, which needs none"
    )


class VideoGenerator(Generator):
    temporal_patch_size: Positive = Field(1, description="frames in a patch")
    attention: Literal["full", "factorised"] = Field(
        "factorised", description="over space and time at once, or in turns, which is cheaper"
    )


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
        """(key of a side of a sample, the side, key of what must divide it), as far as the recipe gives them."""
        return []

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        problems, model = super().find_conflicts(), self.model
        if model.backbone != "dit" or model.vae is not None:
            return problems
        for name, side, patch in self.sides():
            part = getattr(model, patch)
            if side is not None and side % part:
                fits = ", ".join(str(n) for n in range(1, side + 1) if side % n == 0)
                message = f"patches of {part} do not divide a side of {side} ({name}); {fits} do"
                problems.append((f"model.{patch}", name, message))
        return problems


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
