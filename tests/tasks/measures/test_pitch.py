"""The pitch of a tone is found within cents, never an octave off, and survives a spectrogram and back."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from bottega.core.noise import numpy_generator
from bottega.data.audio.spectrogram import MelSpectrogram
from bottega.tasks.measures.pitch import estimate_pitch, note_frequency, semitone_difference

RATE = 8000


def tone(hertz: float, heights: Sequence[float], *, decay: float = 0, rate: int = RATE) -> np.ndarray:
    """One second of a fundamental and its overtones below half the rate, at phases of their own."""
    time = np.arange(rate) / rate
    phases = numpy_generator(0, "phases", hertz).uniform(0, 2 * np.pi, len(heights))
    parts = [
        height * np.sin(2 * np.pi * hertz * k * time + phase)
        for k, (height, phase) in enumerate(zip(heights, phases, strict=True), 1)
        if hertz * k < rate / 2
    ]
    return 0.2 * np.sum(parts, axis=0) * np.exp(-decay * time)


def plucked(length: int, name: str) -> np.ndarray:
    """Karplus and Strong (1983): a burst in a loop of `length` samples and the half that the mean of two takes."""
    sound = np.zeros(RATE + length + 1)
    sound[: length + 1] = numpy_generator(0, "burst", name).uniform(-0.5, 0.5, length + 1)
    for i in range(length + 1, len(sound), length):
        stop = min(i + length, len(sound))
        sound[i:stop] = (sound[i - length : stop - length] + sound[i - length - 1 : stop - length - 1]) / 2
    return sound[length + 1 :]


def cents(found: np.ndarray, hertz: np.ndarray) -> np.ndarray:
    return 100 * np.abs(semitone_difference(found, hertz))


def spread(low: float, high: float, count: int) -> np.ndarray:
    return low * (high / low) ** np.linspace(0, 1, count)


@pytest.mark.parametrize(
    ("heights", "high"),
    [
        ([1], 1980),
        ([1, 0.5], 1980),
        ([1, 0, 0.3, 0, 0.2], 1980),
        (list(1 / np.arange(1, 21)), 1980),
        ([1] * 30, 1980),
        # The second overtone, or the only one, is much the louder.
        ([0.1, 1, 0.5, 0.3], 900),
        ([0.3, 1], 900),
        # Without the fundamental the pitch is heard all the same.
        ([0, 1, 1, 1], 900),
    ],
)
def test_tones_are_found_within_cents(heights: list[float], high: float) -> None:
    hertz = spread(51, high, 100)
    found = estimate_pitch(np.stack([tone(f, heights) for f in hertz]), RATE)
    assert found.shape == (100,)
    assert cents(found, hertz).max() < 1


@pytest.mark.parametrize("decay", [3, 30])
def test_a_decay_does_not_bend_the_pitch(decay: float) -> None:
    hertz = spread(60, 1900, 50)
    assert cents(estimate_pitch(np.stack([tone(f, [1, 0.5, 0.3], decay=decay) for f in hertz]), RATE), hertz).max() < 3


def test_plucked_strings() -> None:
    lengths = np.unique(np.round(RATE / spread(80, 600, 60)).astype(int))
    found = estimate_pitch(np.stack([plucked(length, f"string {length}") for length in lengths]), RATE)
    assert cents(found, RATE / (lengths + 0.5)).max() < 5


def test_noise_of_half_the_size() -> None:
    hertz = spread(60, 1900, 50)
    noise = numpy_generator(1, "noise").normal(0, 0.1, (50, RATE))
    found = estimate_pitch(np.stack([tone(f, [1, 0.7, 0.5, 0.3, 0.2]) for f in hertz]) + noise, RATE)
    assert cents(found, hertz).max() < 25


def test_a_level_that_wanders_is_no_pitch() -> None:
    hertz = spread(60, 1900, 50)
    wander = 0.3 + 0.5 * np.sin(2 * np.pi * 3 * np.arange(RATE) / RATE)
    assert cents(estimate_pitch(np.stack([tone(f, [1, 0.5, 0.2]) for f in hertz]) + wander, RATE), hertz).max() < 5
    assert np.isnan(estimate_pitch(wander, RATE))


def test_other_rates_and_a_note_in_silence() -> None:
    hertz = spread(60, 1900, 20)
    assert cents(estimate_pitch(np.stack([tone(f, [1, 0.5, 0.2], rate=44100) for f in hertz]), 44100), hertz).max() < 1
    note = np.zeros(RATE)
    note[3000:5000] = tone(330, [1, 0.5])[:2000]
    assert cents(estimate_pitch(note, RATE), np.array(330.0)) < 1


@pytest.mark.parametrize("heights", [[1.0, 0.7, 0.5, 0.3, 0.2], [0.8**k for k in range(12)], []])
def test_the_pitch_survives_a_spectrogram_without_phases(heights: list[float]) -> None:
    mel = MelSpectrogram(sample_rate=RATE, fft_size=512, hop_size=128, num_mels=64)
    lengths = np.round(RATE / spread(90, 800, 30)).astype(int)
    hertz = RATE / (lengths + 0.5)
    sounds = [tone(f, heights) if heights else plucked(n, f"string {n}") for f, n in zip(hertz, lengths, strict=True)]
    back = mel.decode(mel.encode(np.stack(sounds).astype(np.float32)), iterations=32)
    assert np.mean(cents(estimate_pitch(back, RATE), hertz) < 50) >= 0.95


def test_what_has_no_pitch() -> None:
    noise = numpy_generator(2, "noise").normal(0, 0.1, (10, RATE))
    assert np.isnan(estimate_pitch(noise, RATE)).all()
    assert np.isnan(estimate_pitch(noise[:, :1000], RATE)).all()
    for silent in (np.zeros(RATE), np.full(RATE, 0.5), 1e-5 * tone(220, [1]), np.zeros(0), np.zeros(3)):
        assert np.isnan(estimate_pitch(silent, RATE))
    for broken in (np.nan, np.inf):
        assert np.isnan(estimate_pitch(np.append(tone(220, [1]), broken), RATE))


def test_a_sound_too_short_for_the_lowest_pitch_may_hold_a_higher() -> None:
    assert cents(estimate_pitch(tone(440, [1, 0.5])[:120], RATE), np.array(440.0)) < 5
    assert np.isnan(estimate_pitch(tone(60, [1, 0.5])[:120], RATE))


@pytest.mark.parametrize(
    ("name", "hertz"),
    [
        ("A4", 440),
        ("A5", 880),
        ("C4", 261.6256),
        ("C#4", 277.1826),
        ("Bb3", 233.0819),
        ("B♭3", 233.0819),
        ("E2", 82.4069),
    ],
)
def test_names_of_notes(name: str, hertz: float) -> None:
    assert note_frequency(name) == pytest.approx(hertz, abs=1e-4)


def test_names_around_an_octave() -> None:
    assert note_frequency("Cb4") == pytest.approx(note_frequency("B3"))
    assert note_frequency("B#3") == pytest.approx(note_frequency("C4"))
    assert note_frequency("C-1") == pytest.approx(8.1758, abs=1e-4)


@pytest.mark.parametrize("name", ["", "A", "H4", "a4", "A44", "A4 ", "4", "cat", "A##4", "digit=3"])
def test_other_names_are_no_notes(name: str) -> None:
    assert note_frequency(name) is None


def test_semitones_are_signed_and_add_up() -> None:
    assert semitone_difference(880, 440) == 12
    assert semitone_difference(440, 880) == -12
    np.testing.assert_allclose(
        semitone_difference(np.array([440 * 2 ** (1 / 12), math.nan]), 440), [1, math.nan], atol=1e-12
    )
