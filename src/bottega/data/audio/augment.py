"""Changed copies of a sound, each a function of (seed, epoch, index) and the name of the change alone.

Every change draws from its own generator, so that one more of them does not alter what the others do.
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
    """All changes of a recipe to one sound [samples]; the sound itself is left as it is."""
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
    """White noise whose standard deviation is `share` of the sound's own."""
    noise = numpy_generator("audio noise", *random_key).standard_normal(len(audio), dtype=np.float32)
    return audio + noise * np.float32(relative_std * audio.std(dtype=np.float64))


def change_gain(audio: np.ndarray, decibels: float, *, random_key: RandomKey) -> np.ndarray:
    """Louder or quieter by up to so many decibels, all changes equally likely."""
    change = numpy_generator("audio gain", *random_key).uniform(-decibels, decibels)
    return audio * np.float32(10 ** (change / 20))


def mask_time(audio: np.ndarray, max_fraction: float, *, random_key: RandomKey) -> np.ndarray:
    """One stretch of up to `share` of the sound is silenced, anywhere; half of `share` on average."""
    start, width = _span(numpy_generator("audio time mask", *random_key), len(audio), max_fraction)
    audio = audio.copy()
    audio[start : start + width] = 0
    return audio


def mask_frequency_band(audio: np.ndarray, max_fraction: float, *, rate: int, random_key: RandomKey) -> np.ndarray:
    """One band of up to `share` of the mel scale is removed from the whole sound."""
    random = numpy_generator("audio frequency mask", *random_key)
    top = float(hertz_to_mel(np.array(rate / 2)))
    width = top * max_fraction * random.random()
    low = (top - width) * random.random()
    first, last = mel_to_hertz(np.array([low, low + width]))
    spectrum = np.fft.rfft(audio)
    hertz = np.fft.rfftfreq(len(audio), 1 / rate)
    spectrum[(hertz >= first) & (hertz < last)] = 0
    return np.fft.irfft(spectrum, len(audio)).astype(np.float32)


def mask_spectrogram(
    frames: np.ndarray, *, time: float, frequency: float, random_key: RandomKey, value: float | None = None
) -> np.ndarray:
    """SpecAugment (Park et al., 2019) on [T, M]: one stretch of time and one of bands set to `value`, or the mean."""
    frames = frames.copy()
    fill = frames.mean() if value is None else value
    start, width = _span(numpy_generator("spectrogram time mask", *random_key), frames.shape[0], time)
    low, bands = _span(numpy_generator("spectrogram frequency mask", *random_key), frames.shape[1], frequency)
    frames[start : start + width] = fill
    frames[:, low : low + bands] = fill
    return frames


def choose_crop_start(length: int, num_samples: int, *, crop: CropPosition, random_key: RandomKey) -> int:
    """Where the part of a sound begins that is heard; 0 where it is not longer than wanted."""
    over = length - num_samples
    if over <= 0 or crop == "start":
        return 0
    if crop == "centre":
        return over // 2
    return int(numpy_generator("audio crop", *random_key).integers(0, over, endpoint=True))


def _span(random: np.random.Generator, length: int, share: float) -> tuple[int, int]:
    width = int(random.integers(0, int(share * length), endpoint=True))
    return int(random.integers(0, length - width, endpoint=True)), width
