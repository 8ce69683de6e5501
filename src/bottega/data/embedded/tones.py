"""The embedded tones: clips of one note each, half plucked strings, half plain tones; the note is the class.

A string is a Karplus-Strong model (1983): a burst of noise in a delay line of one period. An allpass filter (Jaffe and
Smith, 1983) adds the fractional part of the period: without it C5 at 8 kHz is 33 cents off.

Only + - * / and rounding are used, which are exact to the last bit on every processor; numpy's sine and exponential
differ between processors, and so would the fingerprint of the data. B: clips, computed together, sample by sample.
"""

from __future__ import annotations

import math

import numpy as np

from bottega.core.noise import numpy_generator

NUM_CLIPS = 1950
RATE = 8000
# 64 frames of a mel spectrogram at a hop of 128; 1.008 seconds.
NUM_SAMPLES = 63 * 128
NOTES = ("C4", "C#4", "D4", "D#4", "E4", "F4", "F#4", "G4", "G#4", "A4", "A#4", "B4", "C5")
C4_HERTZ, SEMITONE_RATIO, LOG_2 = 261.6255653005986, 1.0594630943592953, 0.6931471805599453
MAX_CENTS = 10
"""Largest detuning of a clip, in hundredths of a semitone."""
NUM_HARMONICS = 6
MAX_PERIOD_SAMPLES = 32
"""Upper limit on the period of a note; that of C4 is 30.6."""


def build_fields() -> dict[str, np.ndarray]:
    """Return the fields audio, int16 `(clips, samples)`, label and sample_rate."""
    number = np.arange(NUM_CLIPS)
    draws = np.stack([numpy_generator("tones", i).random(10 + MAX_PERIOD_SAMPLES) for i in range(NUM_CLIPS)])
    is_string = number // len(NOTES) % 2 == 0
    hertz, loudness = compute_pitches(draws[:, 0]), 0.1 + 0.7 * draws[:, 1]
    audio = np.empty((NUM_CLIPS, NUM_SAMPLES))
    audio[is_string] = _pluck_strings(hertz[is_string], draws[is_string, 2:])
    audio[~is_string] = _play_harmonics(hertz[~is_string], draws[~is_string, 2:])
    audio *= (loudness / np.abs(audio).max(axis=1))[:, None]
    return {
        "audio": np.rint(audio * 32767).astype(np.int16),
        "label": np.array(NOTES)[number % len(NOTES)],
        "sample_rate": np.full(NUM_CLIPS, RATE, np.int32),
    }


def compute_pitches(draw: np.ndarray) -> np.ndarray:
    """Return the frequencies in hertz, (n,), of the notes in turn, each detuned by a draw in 0..1."""
    notes = C4_HERTZ * np.cumprod([1, *[SEMITONE_RATIO] * (len(NOTES) - 1)])
    # e^x with an error below 1e-9 for 10 cents.
    x = (2 * draw - 1) * MAX_CENTS * (LOG_2 / 1200)
    return notes[np.arange(len(draw)) % len(NOTES)] * (1 + x * (1 + x / 2 * (1 + x / 3)))


def _pluck_strings(hertz: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return plucked strings (B, samples); draws (B, 8 + 32) decide decay, brightness and the burst."""
    period, turns = RATE / hertz, hertz / RATE
    decay_seconds, lowpass = 0.2 + 0.8 * draws[:, 0], 0.02 + 0.1 * draws[:, 1]
    decay = 1 - period / (decay_seconds * RATE)
    # The filter (lowpass/2, 1 - lowpass, lowpass/2) delays by one sample at every frequency. The rest of the period is
    # whole_samples in the delay line and a fraction in the allpass filter.
    whole_samples = np.floor(period - 1.5).astype(int)
    fraction = period - 1 - whole_samples
    allpass = _sine(turns * (1 - fraction) / 2) / _sine(turns * (1 + fraction) / 2)

    # Noise for one period, of mean 0, because only `decay` would damp an offset. Sums are over the first axis, row by
    # row: along the last axis, the order of summation depends on the processor.
    is_inside = np.arange(MAX_PERIOD_SAMPLES)[:, None] < np.floor(period)
    burst = np.where(is_inside, np.ascontiguousarray(2 * draws[:, 8:].T - 1), 0)
    burst -= is_inside * (burst.sum(axis=0) / np.floor(period))
    count = len(hertz)
    audio = np.zeros((NUM_SAMPLES + 2, count))
    delay_line = np.zeros((MAX_PERIOD_SAMPLES + NUM_SAMPLES) * count)
    read_positions = np.arange(count) + (MAX_PERIOD_SAMPLES - whole_samples) * count
    previous_delayed = allpassed = np.zeros(count)
    for i in range(NUM_SAMPLES):
        delayed = delay_line[read_positions + i * count]
        allpassed = allpass * (delayed - allpassed) + previous_delayed
        previous_delayed = delayed
        sample = decay * allpassed
        if i < MAX_PERIOD_SAMPLES:
            sample = sample + burst[i]
        audio[i + 2] = sample
        start = (MAX_PERIOD_SAMPLES + i) * count
        delay_line[start : start + count] = lowpass / 2 * (sample + audio[i]) + (1 - lowpass) * audio[i + 1]
    return audio[2:].T


def _play_harmonics(hertz: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Return harmonic tones (B, samples); draws decide decay, brightness, attack and the phases of the harmonics."""
    decay_seconds, attack_seconds = 0.2 + 0.8 * draws[:, 0], 0.005 + 0.025 * draws[:, 2]
    brightness = 0.2 + 0.5 * draws[:, 1]
    harmonic = np.arange(1, NUM_HARMONICS + 1)[:, None]
    turns = hertz / RATE * harmonic
    decay = 1 - 1 / (decay_seconds * RATE)
    cosine, sine = decay * _sine(turns + 0.25), decay * _sine(turns)
    strength = np.cumprod(np.broadcast_to(brightness, turns.shape), axis=0)
    phase = draws[:, 8 : 8 + NUM_HARMONICS].T
    x, y = strength * _sine(phase + 0.25), strength * _sine(phase)
    audio = np.empty((NUM_SAMPLES, len(hertz)))
    for i in range(NUM_SAMPLES):
        audio[i] = y.sum(axis=0) * np.minimum(1, i / (attack_seconds * RATE))
        x, y = x * cosine - y * sine, x * sine + y * cosine
    return audio.T


def _sine(turns: np.ndarray) -> np.ndarray:
    """Return the sine of an angle in turns, with an error below 1e-13."""
    x = turns - np.floor(turns + 0.5)
    x = np.where(np.abs(x) > 0.25, np.copysign(0.5, x) - x, x) * (2 * math.pi)
    total = np.zeros_like(x)
    for n in range(19, 1, -2):
        total = (1 + total) * (-x * x / (n * (n - 1)))
    return x * (1 + total)
