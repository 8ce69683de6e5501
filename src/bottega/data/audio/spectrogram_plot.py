"""Spectrogram plots of waveforms: one PNG with a panel for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bottega.data.audio.spectrogram import stft
from bottega.plots import spectrogram

RANGE_DECIBELS = 80
SILENCE_DECIBELS = -40
"""Audio whose STFT magnitude stays below this is silent: it is drawn as dark, not scaled to full brightness."""
PANEL_WIDTH, PANEL_HEIGHT = 1000, 240
"""Columns and rows that are computed for a panel, about as many as it has pixels."""

TitledWaveform = tuple[str, np.ndarray, int]
"""Title, samples (n,) or (n, channels), sample rate in hertz."""


def plot_spectrogram(samples: np.ndarray, rate: int, path: Path, *, title: str | None = None) -> None:
    """Plot the spectrogram of one waveform."""
    plot_spectrograms([(title or "", samples, rate)], path)


def plot_spectrograms(waveforms: Sequence[TitledWaveform], path: Path) -> None:
    """Plot spectrograms one below the other, each with its own axes, in decibels below its loudest point."""
    assert waveforms, "no waveforms to plot"
    panels = []
    for title, samples, rate in waveforms:
        mono = (samples if samples.ndim == 1 else samples.mean(1)).astype(np.float32)
        peak = float(np.abs(mono).max(initial=0))
        level = f"peak {20 * np.log10(peak):.1f} dB" if peak > 1e-6 else "silent"
        panels.append(
            spectrogram.Panel(
                title,
                f"{len(mono) / rate:.2f} s   {rate:,} Hz   {level}",
                compute_decibels(mono, rate, PANEL_WIDTH, PANEL_HEIGHT),
                seconds=len(mono) / rate,
                kilohertz=rate / 2000,
            )
        )
    spectrogram.plot_panels(panels, path, range_decibels=RANGE_DECIBELS)


def compute_decibels(audio: np.ndarray, rate: int, width: int, height: int) -> np.ndarray:
    """Return levels (height, width) in decibels, from -RANGE_DECIBELS to 0, the highest frequency first.

    The loudest point has 0 decibels, unless the audio is silent.

    A window is about 32 ms: shorter ones smear the harmonics of a voice, longer ones its consonants.
    """
    fft_size = max(64, 1 << round(np.log2(rate * 0.032)))
    hop_size = max(1, min(fft_size // 4, -(-len(audio) // width)))
    magnitude = np.abs(stft(audio if len(audio) else np.zeros(1, np.float32), fft_size=fft_size, hop_size=hop_size))
    # The loudest moment of each column is shown, so that a click in a long recording does not fall between two columns.
    columns = np.linspace(0, len(magnitude), width + 1)
    starts, inverse = np.unique(np.minimum(columns[:-1].astype(int), len(magnitude) - 1), return_inverse=True)
    peaks = np.maximum.reduceat(magnitude, starts, axis=0)[inverse]
    bins = np.linspace(fft_size // 2, 0, height)
    lower_bins = np.minimum(bins.astype(int), fft_size // 2 - 1)
    upper_weight = (bins - lower_bins).astype(np.float32)[:, None]
    level = 20 * np.log10(np.maximum(peaks.T, 1e-7))
    level = level[lower_bins] * (1 - upper_weight) + level[lower_bins + 1] * upper_weight
    # The rounding noise of silence would otherwise have 0 decibels.
    return np.clip(level - max(level.max(), SILENCE_DECIBELS), -RANGE_DECIBELS, 0)
