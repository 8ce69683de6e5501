"""Pitch estimation for audio of a single note, and frequencies of note names.

N samples, F frames, L lags. Talkin's normalised cross-correlation (1995), which is robust to decay, with the rule of YIN (de
Cheveigné and Kawahara, 2002) against octave errors: the first peak that is nearly as high as the highest.
"""

from __future__ import annotations

import math
import re

import numpy as np

PERIODS_PER_FRAME = 4
"""Periods of the lowest pitch in a frame: fewer are too short for noisy audio, more blur a glide."""
LAGS_PER_SAMPLE = 8
"""Lags per sample: at 8 kHz a period of 2 kHz has only four samples, and a parabola alone is off by 20 cents."""
SILENCE_AMPLITUDE = 1e-4
"""Amplitude below which audio is silent: about 3 quantisation steps of 16-bit audio."""
MIN_ENERGY_FRACTION = 0.1
"""Frames with less than this fraction of the loudest frame's energy are ignored; they may be reverberation or artefacts."""
MIN_CORRELATION = 0.5
"""Smallest correlation of a pitch: noise alone reaches 0.2 in a frame, a tone as loud as its noise 0.5."""
PEAK_FRACTION = 0.9
"""Fraction of the highest peak that the first must reach; a fundamental below 1/20 of the energy is taken for its octave."""

SEMITONES = {"C": -9, "D": -7, "E": -5, "F": -4, "G": -2, "A": 0, "B": 2}
"""Semitones above the A of the same octave."""
ACCIDENTALS = {"": 0, "#": 1, "♯": 1, "b": -1, "♭": -1}


def estimate_pitch(audio: np.ndarray, sample_rate: float, *, low: float = 50, high: float = 2000) -> np.ndarray:
    """Return the pitch between `low` and `high`, in hertz, () or (batch,), of audio (N,) or (batch, N).

    NaN for silence, noise or non-finite audio.
    """
    assert 0 < low < high <= sample_rate / 2, "pitches lie between 0 and half of the sample rate"
    if audio.ndim == 1:
        return np.array(_estimate_clip_pitch(audio, sample_rate, low, high))
    return np.array([_estimate_clip_pitch(row, sample_rate, low, high) for row in audio])


def parse_note_frequency(name: str) -> float | None:
    """Return the frequency of a note such as A4 (440 Hz), C#4 or Bb3 in equal temperament; None for any other name."""
    match = re.fullmatch(r"([A-G])([#♯b♭]?)(-?\d)", name)
    if match is None:
        return None
    letter, accidental, octave = match.groups()
    return 440.0 * 2.0 ** (int(octave) - 4 + (SEMITONES[letter] + ACCIDENTALS[accidental]) / 12)


def semitone_difference(a: np.ndarray | float, b: np.ndarray | float) -> np.ndarray:
    """Return how many semitones a is above b, both in hertz; NaN where either is NaN."""
    return 12 * (np.log2(a) - np.log2(b))


def _estimate_clip_pitch(audio: np.ndarray, sample_rate: float, low: float, high: float) -> float:
    if not len(audio) or not np.isfinite(audio).all():
        return math.nan
    audio = _high_pass(audio.astype(np.float64), low / 2 / sample_rate)
    # The window that is compared is at least as long as the lag, so audio shorter than two periods of a pitch cannot have it.
    longest_lag = min(math.ceil(sample_rate / low) + 1, len(audio) // 2 - 1)
    if longest_lag <= sample_rate / high or np.abs(audio).max() <= SILENCE_AMPLITUDE:
        return math.nan
    similarity = _cross_correlate(
        audio, longest_lag, window=min(round(PERIODS_PER_FRAME * sample_rate / low), len(audio) - longest_lag)
    )
    period = _find_period(similarity, LAGS_PER_SAMPLE * sample_rate / high, LAGS_PER_SAMPLE * sample_rate / low)
    return math.nan if period is None else LAGS_PER_SAMPLE * sample_rate / _refine_period(similarity, period)


def _high_pass(audio: np.ndarray, cutoff: float) -> np.ndarray:
    """Return audio with frequencies below `cutoff`, in cycles per sample, attenuated: an offset correlates at every lag.

    The cutoff is half the lowest pitch, since the spectrum of a fast decay is broad: with a cutoff at its pitch, the estimate
    for a note moved by 12 cents.
    """
    frequencies = np.fft.rfftfreq(len(audio))
    return np.fft.irfft(np.fft.rfft(audio) * np.minimum(1, (frequencies / cutoff) ** 2), len(audio))


def _find_period(similarity: np.ndarray, min_lag: float, max_lag: float) -> int | None:
    """Return the index of the first peak that is nearly as high as the highest; None if none is high enough.

    `min_lag` and `max_lag` are indices into `similarity`, LAGS_PER_SAMPLE for each sample.
    """
    # Without an offset the correlation is negative somewhere within a period; peaks before that are on the slope from lag 0.
    negative = np.flatnonzero(similarity < 0)
    min_lag = max(0.99 * min_lag, negative[0] if len(negative) else math.inf)
    peaks = 1 + np.flatnonzero((similarity[1:-1] >= similarity[:-2]) & (similarity[1:-1] > similarity[2:]))
    peaks = peaks[(peaks > min_lag) & (peaks < 1.01 * max_lag)]
    if not len(peaks) or similarity[peaks].max() < MIN_CORRELATION:
        return None
    first = peaks[np.argmax(similarity[peaks] >= PEAK_FRACTION * similarity[peaks].max())]
    # Noise may put a smaller peak on the slope of the true one; the next period is further away than this.
    neighbours = peaks[(peaks >= first) & (peaks < 1.25 * first)]
    return int(neighbours[np.argmax(similarity[neighbours])])


def _refine_period(similarity: np.ndarray, period: int) -> float:
    """Return the period in lags, measured at its furthest multiple that is still a high peak.

    Dividing the position of that peak by the multiple divides the error as well. Overtones that decay faster than the fundamental shift the first peak by up to 14 cents.
    """
    best, count = _interpolate_peak(similarity, period), 1
    while (count + 1) * best + best / 4 < len(similarity) - 1:
        expected_peak, reach = round((count + 1) * best), max(round(best / 8), 1)
        peak = expected_peak - reach + int(np.argmax(similarity[expected_peak - reach : expected_peak + reach + 1]))
        if abs(peak - expected_peak) == reach or similarity[peak] < PEAK_FRACTION * similarity[period]:
            break
        count += 1
        best = _interpolate_peak(similarity, peak) / count
    return best


def _interpolate_peak(similarity: np.ndarray, peak: int) -> float:
    """Return the position of the vertex of the parabola through a peak and its neighbours."""
    a, b, c = similarity[peak - 1 : peak + 2].tolist()
    return peak + (a - c) / (a - 2 * b + c) / 2


def _cross_correlate(audio: np.ndarray, longest_lag: int, *, window: int) -> np.ndarray:
    """Return the normalised cross-correlation (L,), -1 to 1, of loud frames with the audio that follows, at LAGS_PER_SAMPLE lags per sample.

    It is summed over frames before normalising, so that louder frames count more. It is 1 at a period even during a decay, which
    lowers and shifts a plain autocorrelation.
    """
    num_frames = 1 + (len(audio) - window - longest_lag) // max(window // 2, 1)
    starts = np.arange(num_frames) * max(window // 2, 1)
    frames = audio[starts[:, None] + np.arange(window + longest_lag)]
    sums = np.cumsum(np.pad(frames**2, ((0, 0), (1, 0))), axis=1)
    energy = sums[:, window : window + longest_lag + 1] - sums[:, : longest_lag + 1]
    is_loud = energy[:, 0] >= MIN_ENERGY_FRACTION * energy[:, 0].max()
    frames, energy = frames[is_loud], np.maximum(energy[is_loud], 1e-300)
    size = 1 << (window + 2 * longest_lag).bit_length()
    # Spectra are summed before one inverse transform, whose greater length interpolates between samples.
    window_spectra, frame_spectra = np.fft.rfft(frames[:, :window], size), np.fft.rfft(frames, size)
    product = (np.conj(window_spectra) * frame_spectra).sum(0)
    product[-1] /= 2
    products = LAGS_PER_SAMPLE * np.fft.irfft(product, LAGS_PER_SAMPLE * size)[: LAGS_PER_SAMPLE * longest_lag + 1]
    norms = np.sqrt(energy * energy[:, :1]).sum(0)
    return products / np.interp(np.arange(len(products)) / LAGS_PER_SAMPLE, np.arange(longest_lag + 1), norms)
