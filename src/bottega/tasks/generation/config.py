"""Recipes of image, audio and video generation."""

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
    """The text encoder of captions: a frozen one from a folder, or a small one that is trained with the model."""

    from_: str | None = Field(None, alias="from", description="a transformers text encoder with its tokenizer; frozen")
    hidden_size: Positive = Field(128, description="trained encoder: width")
    num_layers: Positive = Field(2, description="trained encoder: blocks")
    vocab_size: Positive = Field(2048, ge=257, description="trained encoder: size of the vocabulary, bytes included")
    max_tokens: Positive | None = Field(
        None,
        description="captions are cut at this many tokens; null is 32, or for a frozen encoder its maximum up to 128",
    )


class Generator(Model):
    """A diffusion transformer over patches of any medium, diffusers' UNet, or a language model over codes."""

    from_: str | None = Field(
        None, alias="from", description="weights to start from: a run, or a diffusers UNet folder"
    )
    backbone: Literal["dit", "unet", "tokens"] = Field(
        "dit", description="a diffusion transformer, diffusers' UNet (images), or a language model over codes"
    )
    tokenizer: str | None = Field(
        None, description="tokens: the tokenizer, such as needs.tokens, an image_tokens run or its exported folder"
    )
    objective: ObjectiveName = Field("flow", description="flow matching, noise prediction (DDPM), or v-prediction")
    times: Literal["logit_normal", "uniform"] = Field("logit_normal", description="flow: how training times are drawn")
    time_shift: Number | None = Field(
        None, gt=0, description="flow: above 1 spends more time at high noise, for large images and video; null is 1"
    )
    noise_schedule: Literal["cosine", "linear", "scaled_linear"] = Field(
        "cosine", description="noise and v: how noise grows over 1,000 steps"
    )
    min_snr: Number | None = Field(None, gt=0, description="noise and v: cap on the weight of clean times, such as 5")
    hidden_size: Positive = Field(256, description="dit, tokens: width; unet: channels of the first stage")
    num_layers: Positive = Field(6, description="dit, tokens: blocks; unet: residual blocks of each stage")
    num_heads: Positive = Field(4, description="attention heads")
    patch_size: Positive = Field(2, description="dit: side of a patch")
    stages: Positive = Field(3, description="unet: resolutions, each of half the side")
    condition: Condition = Field("class", description="what samples are conditioned on")
    num_classes: Positive | None = Field(
        None, description="condition class: number of classes; null counts them in the data"
    )
    condition_size: Positive | None = Field(
        None, description="condition vector: its width; null reads it from the data"
    )
    condition_dropout: Probability = Field(0.1, description="fraction trained without the condition, for guidance")
    text: TextEncoderOptions = Field(default_factory=TextEncoderOptions, description="condition text: the text encoder")
    vae: str | None = Field(
        None,
        description="train in the latents of this run, such as needs.vae, or of a diffusers AutoencoderKL folder; "
        "null generates values directly",
    )


class AudioGenerator(Generator):
    """A generator of mel spectrograms."""

    axes: Literal[1, 2] = Field(2, description="patches of time alone, all bands in each (1), or of time and frequency")
    vocoder: str | None = Field(
        None, description="folder of a transformers vocoder, from mel to waveform; null uses Griffin-Lim"
    )


class VideoGenerator(Generator):
    """A generator of video clips."""

    temporal_patch_size: Positive = Field(1, description="frames in a patch")
    attention: Literal["full", "factorised"] = Field(
        "factorised", description="over space and time at once, or alternating, which is cheaper"
    )


class GeneratorSamples(Samples):
    """Sampling options of a generator."""

    count: Positive = Field(16, description="number of samples")
    steps: Positive = Field(30, description="steps of the sampler")
    sampler: Literal["euler", "heun", "dpm"] = Field(
        "heun", description="ODE solver; heun costs twice as much per step"
    )
    guidance: Number = Field(1.0, ge=0, description="classifier-free guidance scale; 1 is off")
    temperature: Number = Field(1.0, ge=0, description="tokens: below 1 favours likely codes, 0 is greedy")
    top_k: Positive | None = Field(None, description="tokens: sample from the k most likely; null is all")
    top_p: Probability | None = Field(
        None, gt=0, description="tokens: sample from the most likely that sum to p; null is all"
    )
    prompts: tuple[str, ...] = Field((), description="condition text: prompts; empty uses captions of the data")


class GeneratorRecipe(MediaRecipe):
    """A recipe whose model generates samples of the size of its data."""

    model: Generator = Field(default_factory=Generator, description="the model")

    def list_sides(self) -> list[tuple[str, int | None, str]]:
        """Return (key of a side, the side or None, model key that must divide it) for each side in the recipe."""
        return []

    def find_conflicts(self) -> list[tuple[str, str, str]]:
        problems, model = super().find_conflicts(), self.model
        if self.engine == "jax" and model.text.from_ is not None:
            message = "a text encoder of transformers has no form in JAX; remove it to train one, or use engine=torch"
            problems.append(("model.text.from", "engine", message))
        if model.backbone != "dit" or model.vae is not None:
            return problems
        for name, side, patch_key in self.list_sides():
            patch_size = getattr(model, patch_key)
            if side is not None and side % patch_size:
                divisors = ", ".join(str(n) for n in range(1, side + 1) if side % n == 0)
                message = f"patches of {patch_size} do not divide a side of {side} ({name}); {divisors} do"
                problems.append((f"model.{patch_key}", name, message))
        return problems


class ImageRecipe(GeneratorRecipe):
    """A recipe of image generation."""

    task: Literal["image"] = Field("image", description="images from noise")
    model: Generator = Field(default_factory=Generator, description="the model")
    data: ImageData = Field(default_factory=ImageData, description="the data")
    samples: GeneratorSamples = Field(default_factory=GeneratorSamples, description="samples drawn while training")

    def list_sides(self) -> list[tuple[str, int | None, str]]:
        return [("data.image_size", self.data.image_size, "patch_size")]


class AudioRecipe(GeneratorRecipe):
    """A recipe of audio generation."""

    task: Literal["audio"] = Field("audio", description="audio from noise, over mel spectrograms")
    model: AudioGenerator = Field(default_factory=AudioGenerator, description="the model")
    data: AudioData = Field(default_factory=AudioData, description="the data")
    samples: GeneratorSamples = Field(default_factory=GeneratorSamples, description="samples drawn while training")

    def list_sides(self) -> list[tuple[str, int | None, str]]:
        return [("data.num_mels", self.data.num_mels, "patch_size")] if self.model.axes == 2 else []


class VideoRecipe(GeneratorRecipe):
    """A recipe of video generation."""

    task: Literal["video"] = Field("video", description="video from noise")
    model: VideoGenerator = Field(default_factory=VideoGenerator, description="the model")
    data: VideoData = Field(default_factory=VideoData, description="the data")
    samples: GeneratorSamples = Field(default_factory=GeneratorSamples, description="samples drawn while training")

    def list_sides(self) -> list[tuple[str, int | None, str]]:
        frames = ("data.num_frames", self.data.num_frames, "temporal_patch_size")
        return [frames, ("data.image_size", self.data.image_size, "patch_size")]
