"""Pitch estimates are accurate within cents, without octave errors, also after a mel spectrogram round trip."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from bottega.core.noise import numpy_generator
from bottega.data.audio.spectrogram import MelSpectrogram
from bottega.tasks.metrics.pitch import estimate_pitch, parse_note_frequency, semitone_difference

RATE = 8000


def tone(hertz: float, amplitudes: Sequence[float], *, decay: float = 0, rate: int = RATE) -> np.ndarray:
    """Return one second of a fundamental and its overtones below the Nyquist frequency, with random phases."""
    time = np.arange(rate) / rate
    phases = numpy_generator(0, "phases", hertz).uniform(0, 2 * np.pi, len(amplitudes))
    parts = [
        amplitude * np.sin(2 * np.pi * hertz * k * time + phase)
        for k, (amplitude, phase) in enumerate(zip(amplitudes, phases, strict=True), 1)
        if hertz * k < rate / 2
    ]
    return 0.2 * np.sum(parts, axis=0) * np.exp(-decay * time)


def pluck_string(length: int, name: str) -> np.ndarray:
    """Karplus and Strong (1983): a noise burst in a delay loop of `length` + 1/2 samples."""
    waveform = np.zeros(RATE + length + 1)
    waveform[: length + 1] = numpy_generator(0, "burst", name).uniform(-0.5, 0.5, length + 1)
    for i in range(length + 1, len(waveform), length):
        stop = min(i + length, len(waveform))
        waveform[i:stop] = (waveform[i - length : stop - length] + waveform[i - length - 1 : stop - length - 1]) / 2
    return waveform[length + 1 :]


def cents(estimates: np.ndarray, hertz: np.ndarray) -> np.ndarray:
    return 100 * np.abs(semitone_difference(estimates, hertz))


def log_spaced(low: float, high: float, count: int) -> np.ndarray:
    return low * (high / low) ** np.linspace(0, 1, count)


@pytest.mark.parametrize(
    ("amplitudes", "high"),
    [
        ([1], 1980),
        ([1, 0.5], 1980),
        ([1, 0, 0.3, 0, 0.2], 1980),
        (list(1 / np.arange(1, 21)), 1980),
        ([1] * 30, 1980),
        # The second harmonic is much louder than the fundamental.
        ([0.1, 1, 0.5, 0.3], 900),
        ([0.3, 1], 900),
        # The fundamental is missing.
        ([0, 1, 1, 1], 900),
    ],
)
def test_tones_are_estimated_within_cents(amplitudes: list[float], high: float) -> None:
    hertz = log_spaced(51, high, 100)
    estimates = estimate_pitch(np.stack([tone(f, amplitudes) for f in hertz]), RATE)
    assert estimates.shape == (100,)
    assert cents(estimates, hertz).max() < 1


@pytest.mark.parametrize("decay", [3, 30])
def test_a_decay_does_not_bend_the_pitch(decay: float) -> None:
    hertz = log_spaced(60, 1900, 50)
    assert cents(estimate_pitch(np.stack([tone(f, [1, 0.5, 0.3], decay=decay) for f in hertz]), RATE), hertz).max() < 3


def test_plucked_strings_are_estimated_within_cents() -> None:
    lengths = np.unique(np.round(RATE / log_spaced(80, 600, 60)).astype(int))
    estimates = estimate_pitch(np.stack([pluck_string(length, f"string {length}") for length in lengths]), RATE)
    assert cents(estimates, RATE / (lengths + 0.5)).max() < 5


def test_noise_costs_at_most_a_quarter_semitone() -> None:
    hertz = log_spaced(60, 1900, 50)
    noise = numpy_generator(1, "noise").normal(0, 0.1, (50, RATE))
    estimates = estimate_pitch(np.stack([tone(f, [1, 0.7, 0.5, 0.3, 0.2]) for f in hertz]) + noise, RATE)
    assert cents(estimates, hertz).max() < 25


def test_low_frequency_drift_is_not_a_pitch() -> None:
    hertz = log_spaced(60, 1900, 50)
    wander = 0.3 + 0.5 * np.sin(2 * np.pi * 3 * np.arange(RATE) / RATE)
    assert cents(estimate_pitch(np.stack([tone(f, [1, 0.5, 0.2]) for f in hertz]) + wander, RATE), hertz).max() < 5
    assert np.isnan(estimate_pitch(wander, RATE))


def test_other_sample_rates_and_a_note_in_silence() -> None:
    hertz = log_spaced(60, 1900, 20)
    assert cents(estimate_pitch(np.stack([tone(f, [1, 0.5, 0.2], rate=44100) for f in hertz]), 44100), hertz).max() < 1
    note = np.zeros(RATE)
    note[3000:5000] = tone(330, [1, 0.5])[:2000]
    assert cents(estimate_pitch(note, RATE), np.array(330.0)) < 1


@pytest.mark.parametrize("amplitudes", [[1.0, 0.7, 0.5, 0.3, 0.2], [0.8**k for k in range(12)], []])
def test_the_pitch_survives_a_spectrogram_without_phases(amplitudes: list[float]) -> None:
    mel = MelSpectrogram(sample_rate=RATE, fft_size=512, hop_size=128, num_mels=64)
    lengths = np.round(RATE / log_spaced(90, 800, 30)).astype(int)
    hertz = RATE / (lengths + 0.5)
    waveforms = [
        tone(f, amplitudes) if amplitudes else pluck_string(n, f"string {n}")
        for f, n in zip(hertz, lengths, strict=True)
    ]
    decoded = mel.decode(mel.encode(np.stack(waveforms).astype(np.float32)), iterations=32)
    assert np.mean(cents(estimate_pitch(decoded, RATE), hertz) < 50) >= 0.95


def test_noise_silence_and_nan_have_no_pitch() -> None:
    noise = numpy_generator(2, "noise").normal(0, 0.1, (10, RATE))
    assert np.isnan(estimate_pitch(noise, RATE)).all()
    assert np.isnan(estimate_pitch(noise[:, :1000], RATE)).all()
    for silent in (np.zeros(RATE), np.full(RATE, 0.5), 1e-5 * tone(220, [1]), np.zeros(0), np.zeros(3)):
        assert np.isnan(estimate_pitch(silent, RATE))
    for broken in (np.nan, np.inf):
        assert np.isnan(estimate_pitch(np.append(tone(220, [1]), broken), RATE))


def test_short_clips_have_only_pitches_whose_period_fits() -> None:
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
def test_note_names(name: str, hertz: float) -> None:
    assert parse_note_frequency(name) == pytest.approx(hertz, abs=1e-4)


def test_note_names_across_octaves() -> None:
    assert parse_note_frequency("Cb4") == pytest.approx(parse_note_frequency("B3"))
    assert parse_note_frequency("B#3") == pytest.approx(parse_note_frequency("C4"))
    assert parse_note_frequency("C-1") == pytest.approx(8.1758, abs=1e-4)


@pytest.mark.parametrize("name", ["", "A", "H4", "a4", "A44", "A4 ", "4", "cat", "A##4", "digit=3"])
def test_other_names_are_not_notes(name: str) -> None:
    assert parse_note_frequency(name) is None


def test_semitones_are_signed_and_add_up() -> None:
    assert semitone_difference(880, 440) == 12
    assert semitone_difference(440, 880) == -12
    np.testing.assert_allclose(
        semitone_difference(np.array([440 * 2 ** (1 / 12), math.nan]), 440), [1, math.nan], atol=1e-12
    )
