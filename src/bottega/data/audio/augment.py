"""Waveform augmentation: noise, gain, and masks in time and frequency.

Each augmentation is a function of (seed, epoch, index). It draws from a random generator of its own, so that adding one
does not change the others.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from bottega.core.noise import numpy_generator
from bottega.data.audio.config import AudioAugmentation
from bottega.data.audio.spectrogram import hertz_to_mel, mel_to_hertz

CropPosition = Literal["random", "start", "centre"]
RandomKey = tuple[int, int, int]
"""Seed, epoch, index."""


def augment_audio(audio: np.ndarray, options: AudioAugmentation, *, rate: int, random_key: RandomKey) -> np.ndarray:
    """Apply all augmentations of a recipe to a waveform `(samples,)`; the input is not modified."""
    if not options.enabled or not len(audio):
        return audio
    if options.noise:
        audio = add_noise(audio, options.noise, random_key=random_key)
    if options.frequency_mask:
        audio = mask_frequency_band(audio, options.frequency_mask, rate=rate, random_key=random_key)
    if options.time_mask:
        audio = mask_time(audio, options.time_mask, random_key=random_key)
    return change_gain(audio, options.gain, random_key=random_key) if options.gain else audio


def add_noise(audio: np.ndarray, relative_std: float, *, random_key: RandomKey) -> np.ndarray:
    """Add white noise whose standard deviation is `relative_std` times that of the waveform."""
    noise = numpy_generator("audio noise", *random_key).standard_normal(len(audio), dtype=np.float32)
    return audio + noise * np.float32(relative_std * audio.std(dtype=np.float64))


def change_gain(audio: np.ndarray, decibels: float, *, random_key: RandomKey) -> np.ndarray:
    """Change the gain by a number of decibels drawn uniformly from `-decibels` to `decibels`."""
    change = numpy_generator("audio gain", *random_key).uniform(-decibels, decibels)
    return audio * np.float32(10 ** (change / 20))


def mask_time(audio: np.ndarray, max_fraction: float, *, random_key: RandomKey) -> np.ndarray:
    """Silence one random span of at most `max_fraction` of the waveform, on average half as much."""
    start, width = _draw_span(numpy_generator("audio time mask", *random_key), len(audio), max_fraction)
    audio = audio.copy()
    audio[start : start + width] = 0
    return audio


def mask_frequency_band(audio: np.ndarray, max_fraction: float, *, rate: int, random_key: RandomKey) -> np.ndarray:
    """Remove one random frequency band of up to `max_fraction` of the mel scale."""
    rng = numpy_generator("audio frequency mask", *random_key)
    max_mel = float(hertz_to_mel(np.array(rate / 2)))
    width = max_mel * max_fraction * rng.random()
    low_mel = (max_mel - width) * rng.random()
    low_hertz, high_hertz = mel_to_hertz(np.array([low_mel, low_mel + width]))
    spectrum = np.fft.rfft(audio)
    hertz = np.fft.rfftfreq(len(audio), 1 / rate)
    spectrum[(hertz >= low_hertz) & (hertz < high_hertz)] = 0
    return np.fft.irfft(spectrum, len(audio)).astype(np.float32)


def mask_spectrogram(
    frames: np.ndarray,
    *,
    max_time_fraction: float,
    max_frequency_fraction: float,
    random_key: RandomKey,
    value: float | None = None,
) -> np.ndarray:
    """Apply SpecAugment (Park et al., 2019) to `(frames, bands)`: mask one random span of time and one of frequency.

    Masked values become `value`, or the mean of the spectrogram if `value` is None.
    """
    frames = frames.copy()
    fill = frames.mean() if value is None else value
    start, width = _draw_span(numpy_generator("spectrogram time mask", *random_key), frames.shape[0], max_time_fraction)
    first_band, num_bands = _draw_span(
        numpy_generator("spectrogram frequency mask", *random_key), frames.shape[1], max_frequency_fraction
    )
    frames[start : start + width] = fill
    frames[:, first_band : first_band + num_bands] = fill
    return frames


def choose_crop_start(length: int, num_samples: int, *, crop: CropPosition, random_key: RandomKey) -> int:
    """Return the first sample of a crop of `num_samples` from a waveform of `length` samples; 0 if that is not longer."""
    excess = length - num_samples
    if excess <= 0 or crop == "start":
        return 0
    if crop == "centre":
        return excess // 2
    return int(numpy_generator("audio crop", *random_key).integers(0, excess, endpoint=True))


def _draw_span(rng: np.random.Generator, length: int, max_fraction: float) -> tuple[int, int]:
    """Return start and width of a random span of up to `max_fraction` of `length`."""
    width = int(rng.integers(0, int(max_fraction * length), endpoint=True))
    return int(rng.integers(0, length - width, endpoint=True)), width
