"""The `data` section of audio recipes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from bottega.config.media import MediaData
from bottega.config.section import Number, Positive, Probability, Section


class AudioAugmentation(Section):
    """Options of `data.augmentation` for audio."""

    enabled: bool = Field(True, description="whether augmentation is on")
    noise: Number = Field(0.0, ge=0, description="standard deviation of added noise, relative to that of the clip")
    gain: Number = Field(0.0, ge=0, description="largest change of gain, in decibels")
    time_mask: Probability = Field(0.0, description="largest fraction of the time that is silenced")
    frequency_mask: Probability = Field(0.0, description="largest fraction of the mel scale that is removed")


class AudioData(MediaData):
    """The `data` section of tasks that read audio."""

    sample_rate: Positive | None = Field(
        None, ge=1000, le=768_000, description="samples per second; null: as in the data"
    )
    seconds: Number | None = Field(None, gt=0, le=3600, description="length of a sample; null: the longest in the data")
    crop: Literal["random", "start", "centre"] = Field("random", description="which part of a longer recording is used")
    normalise: Literal["none", "peak", "loudness"] = Field(
        "none", description="scale to a peak of 0.95, or to a loudness of -23 LUFS (ITU-R BS.1770)"
    )
    num_mels: Positive = Field(64, le=2048, description="number of mel bands")
    fft_size: Positive = Field(1024, ge=2, le=1 << 16, description="samples in an FFT window")
    hop_size: Positive = Field(256, description="samples between two windows")
    augmentation: AudioAugmentation | None = Field(None, description="augmentation of the training audio")

    @model_validator(mode="after")
    def _check_overlap(self) -> Self:
        if self.hop_size > self.fft_size // 2:
            raise ValueError(
                f"hop_size: {self.hop_size} is more than half of fft_size {self.fft_size}, so audio between windows would "
                f"be lost; use {self.fft_size // 2} or less, usually {max(1, self.fft_size // 4)}"
            )
        return self
