"""The `data` section of sound."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from bottega.config.media import MediaData
from bottega.config.section import Number, Positive, Probability, Section


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
