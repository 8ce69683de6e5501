"""Audio augmentation has the configured strength and is a function of (seed, epoch, index)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.data.audio.augment import (
    RandomKey,
    add_noise,
    augment_audio,
    change_gain,
    choose_crop_start,
    mask_frequency_band,
    mask_spectrogram,
    mask_time,
)
from bottega.data.audio.config import AudioAugmentation
from bottega.data.audio.spectrogram import hertz_to_mel

RATE = 8000
AUDIO = np.random.default_rng(0).standard_normal(4000).astype(np.float32) * np.float32(0.2)
NUM_DRAWS = 400
AUGMENTATIONS: dict[str, Callable[[RandomKey], np.ndarray]] = {
    "noise": lambda key: add_noise(AUDIO, 0.3, random_key=key),
    "gain": lambda key: change_gain(AUDIO, 6, random_key=key),
    "time": lambda key: mask_time(AUDIO, 0.4, random_key=key),
    "band": lambda key: mask_frequency_band(AUDIO, 0.4, rate=RATE, random_key=key),
    "spectrogram": lambda key: mask_spectrogram(
        AUDIO.reshape(80, 50), max_time_fraction=0.4, max_frequency_fraction=0.4, random_key=key
    ),
}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentation_is_a_function_of_seed_epoch_and_index(name: str) -> None:
    augment, before = AUGMENTATIONS[name], AUDIO.copy()
    first = augment((1, 2, 3))
    assert first.dtype == np.float32
    np.testing.assert_array_equal(first, augment((1, 2, 3)))
    for key in ((0, 2, 3), (1, 0, 3), (1, 2, 0)):
        assert not np.array_equal(first, augment(key))
    np.testing.assert_array_equal(AUDIO, before)


@given(st.floats(0.01, 2))
def test_noise_has_the_configured_level(fraction: float) -> None:
    noise = add_noise(AUDIO, fraction, random_key=(0, 0, 0)) - AUDIO
    # 4,000 draws: the relative error of the deviation is 1.1 %.
    assert noise.std() / AUDIO.std() == pytest.approx(fraction, rel=0.05)
    assert abs(noise.mean()) < 0.1 * fraction * AUDIO.std()


def test_gain_is_uniform_over_its_range() -> None:
    ratios = np.array([change_gain(AUDIO, 6, random_key=(0, 0, i))[0] / AUDIO[0] for i in range(NUM_DRAWS)])
    decibels = 20 * np.log10(ratios)
    assert np.abs(decibels).max() <= 6 + 1e-4
    assert decibels.min() < -5.8
    assert decibels.max() > 5.8
    assert abs(decibels.mean()) < 0.5
    assert decibels.std() == pytest.approx(6 / np.sqrt(3), rel=0.1)


def test_time_mask_is_one_interval_of_up_to_the_configured_fraction() -> None:
    masked = np.array([mask_time(AUDIO, 0.4, random_key=(0, 0, i)) == 0 for i in range(NUM_DRAWS)])
    fractions = masked.mean(1)
    assert fractions.max() <= 0.4
    assert fractions.max() > 0.38
    assert fractions.mean() == pytest.approx(0.2, abs=0.02)
    assert (np.abs(np.diff(masked.astype(int), axis=1)).sum(1) <= 2).all()
    # The interval lies anywhere; the very first sample is rarely in it.
    assert masked[:, 0].any() or masked[:, 100].any()
    assert masked[:, -100].any()


def test_band_mask_silences_a_fraction_of_the_mel_scale() -> None:
    hertz = np.fft.rfftfreq(len(AUDIO), 1 / RATE)
    mels = hertz_to_mel(hertz)
    weights = np.gradient(mels) / np.gradient(mels).sum()
    fractions = []
    for i in range(100):
        spectrum = np.abs(np.fft.rfft(mask_frequency_band(AUDIO, 0.4, rate=RATE, random_key=(0, 0, i))))
        silent = spectrum < 1e-3 * np.abs(np.fft.rfft(AUDIO))
        fractions.append(weights[silent].sum())
        assert np.abs(np.diff(silent.astype(int))).sum() <= 2
    assert max(fractions) <= 0.41
    assert np.mean(fractions) == pytest.approx(0.2, abs=0.03)


def test_a_spectrogram_is_masked_in_time_and_in_bands() -> None:
    frames = np.random.default_rng(1).standard_normal((100, 64)).astype(np.float32)
    times, bands = [], []
    for i in range(NUM_DRAWS):
        changed = (
            mask_spectrogram(
                frames, max_time_fraction=0.3, max_frequency_fraction=0.5, random_key=(0, 0, i), value=-11.5
            )
            == -11.5
        )
        times.append(changed.all(1).mean())
        bands.append(changed.all(0).mean())
    assert max(times) == 0.3
    assert max(bands) == 0.5
    assert np.mean(times) == pytest.approx(0.15, abs=0.02)
    assert np.mean(bands) == pytest.approx(0.25, abs=0.03)
    np.testing.assert_array_equal(
        mask_spectrogram(frames, max_time_fraction=0, max_frequency_fraction=0, random_key=(0, 0, 0)), frames
    )


@given(st.integers(0, 300), st.integers(1, 300), st.sampled_from(["random", "start", "centre"]), st.integers(0, 50))
def test_crop_lies_within_the_audio(length: int, crop_length: int, crop: str, index: int) -> None:
    start = choose_crop_start(length, crop_length, crop=crop, random_key=(0, 0, index))  # type: ignore[arg-type]
    assert 0 <= start <= max(0, length - crop_length)
    if crop == "start":
        assert start == 0
    if crop == "centre" and length > crop_length:
        assert abs((length - crop_length - start) - start) <= 1


def test_random_crop_starts_are_uniform() -> None:
    starts = [choose_crop_start(14, 10, crop="random", random_key=(0, epoch, 7)) for epoch in range(500)]
    counts = np.bincount(starts, minlength=5)
    assert len(counts) == 5
    assert counts.min() > 70  # 100 expected, with a deviation of 9


def test_options_combine_and_without_options_audio_is_unchanged() -> None:
    options = AudioAugmentation(noise=0.1, gain=3.0, time_mask=0.2, frequency_mask=0.2)
    changed = augment_audio(AUDIO, options, rate=RATE, random_key=(0, 0, 0))
    assert changed.dtype == np.float32
    assert changed.shape == AUDIO.shape
    # Each option has its own random stream.
    gain_only = augment_audio(AUDIO, AudioAugmentation(gain=3.0), rate=RATE, random_key=(0, 0, 0))
    np.testing.assert_array_equal(gain_only, change_gain(AUDIO, 3.0, random_key=(0, 0, 0)))
    for disabled in (AudioAugmentation(), AudioAugmentation(enabled=False, noise=1.0)):
        assert augment_audio(AUDIO, disabled, rate=RATE, random_key=(0, 0, 0)) is AUDIO
    empty = np.zeros(0, np.float32)
    assert len(augment_audio(empty, options, rate=RATE, random_key=(0, 0, 0))) == 0
