"""Plot spectrograms with axes as one PNG, with Pillow alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bottega.core.errors import EnvironmentProblem
from bottega.data.audio.spectrogram import stft
from bottega.data.image.caption import to_printable

# From silent to loud. Lightness increases monotonically, so that it also reads in grey and for the colour-blind.
ANCHORS = ("#0b0a1e", "#2a1a5e", "#6a1f7b", "#b5306b", "#ec6a4c", "#fbb35a", "#fdf3c0")
PAPER, INK, FAINT = "#ffffff", "#1c1b29", "#6d6b7b"
RANGE_DECIBELS = 80
WIDTH, HEIGHT = 880, 220
LEFT, RIGHT, TOP, BOTTOM, GAP = 74, 84, 34, 34, 10
SCALE = 2
"""Pixels per unit of the sizes above, for sharp text on high-resolution screens."""

TitledWaveform = tuple[str, np.ndarray, int]
"""Title, samples `(samples,)` or `(samples, channels)`, sample rate."""


def plot_spectrogram(samples: np.ndarray, rate: int, path: Path, *, title: str | None = None) -> None:
    """Plot the spectrogram of one waveform."""
    plot_spectrograms([(title or "", samples, rate)], path)


def plot_spectrograms(waveforms: Sequence[TitledWaveform], path: Path) -> None:
    """Plot spectrograms one below the other, each with its own axes, in decibels relative to its loudest point."""
    assert waveforms, "nothing to plot"
    Image, ImageDraw, _ = _import_pillow()
    row = TOP + HEIGHT + BOTTOM
    size = (LEFT + WIDTH + RIGHT, row * len(waveforms) + GAP * 2)
    sheet = Image.new("RGB", (size[0] * SCALE, size[1] * SCALE), PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, (title, samples, rate) in enumerate(waveforms):
        top = GAP + number * row + TOP
        mono = (samples if samples.ndim == 1 else samples.mean(1)).astype(np.float32)
        spectrogram = Image.fromarray(_map_colours(compute_decibels(mono, rate, WIDTH * SCALE, HEIGHT * SCALE)))
        sheet.paste(spectrogram, (LEFT * SCALE, top * SCALE))
        _draw_axes(draw, top, seconds=len(mono) / rate, rate=rate)
        _draw_text(draw, (LEFT, top - 9), to_printable(title), size=14, anchor="ls", fill=INK)
        peak = float(np.abs(mono).max(initial=0))
        level = f"peak {20 * np.log10(peak):.1f} dB" if peak > 1e-6 else "silent"
        details = f"{len(mono) / rate:.2f} s   {rate:,} Hz   {level}"
        _draw_text(draw, (LEFT + WIDTH, top - 9), details, size=11, anchor="rs", fill=FAINT)
        _draw_scale(sheet, draw, top)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The plot has hardly more than 256 colours, and a palette halves the file.
    sheet.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)


def compute_decibels(audio: np.ndarray, rate: int, width: int, height: int) -> np.ndarray:
    """Return the spectrogram `(height, width)` in decibels: 0 at the loudest point, the highest frequency on top.

    Values are clipped at -RANGE_DECIBELS. A window is about 32 ms: shorter ones blur the harmonics of speech, longer ones
    its consonants.
    """
    fft_size = max(64, 1 << round(np.log2(rate * 0.032)))
    hop_size = max(1, min(fft_size // 4, -(-len(audio) // width)))
    magnitude = np.abs(stft(audio if len(audio) else np.zeros(1, np.float32), fft_size=fft_size, hop_size=hop_size))
    # A column shows its loudest frame, so that a click in a long recording stays visible.
    columns = np.linspace(0, len(magnitude), width + 1)
    starts, column = np.unique(np.minimum(columns[:-1].astype(int), len(magnitude) - 1), return_inverse=True)
    peaks = np.maximum.reduceat(magnitude, starts, axis=0)[column]
    bins = np.linspace(fft_size // 2, 0, height)
    low = np.minimum(bins.astype(int), fft_size // 2 - 1)
    fraction = (bins - low).astype(np.float32)[:, None]
    level = 20 * np.log10(np.maximum(peaks.T, 1e-7))
    level = level[low] * (1 - fraction) + level[low + 1] * fraction
    # Silence stays dark: rounding noise is not scaled up to full brightness.
    return np.clip(level - max(level.max(), -40), -RANGE_DECIBELS, 0)


def _map_colours(level: np.ndarray) -> np.ndarray:
    """Map decibels to colours, uint8 `(height, width, 3)`."""
    anchors = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in ANCHORS], np.float64)
    place = np.linspace(0, len(anchors) - 1, 256)
    table = np.stack([np.interp(place, range(len(anchors)), anchors[:, i]) for i in range(3)], axis=1)
    return table.round().astype(np.uint8)[((level / RANGE_DECIBELS + 1) * 255).astype(np.uint8)]


def choose_ticks(top: float, max_steps: int) -> list[float]:
    """Return round tick values from 0 to `top`, at most `max_steps` steps of 1, 2 or 5 times a power of ten."""
    if top <= 0:
        return [0.0]
    power = 10 ** np.floor(np.log10(top / max_steps))
    step = next(float(power * times) for times in (1, 2, 5, 10) if top / (power * times) <= max_steps)
    return [round(step * i, 10) for i in range(int(top / step + 1e-9) + 1)]


def _draw_axes(draw: Any, top: int, *, seconds: float, rate: int) -> None:
    for value in choose_ticks(seconds, 10):
        x = LEFT + WIDTH * value / seconds if seconds else LEFT
        _draw_line(draw, (x, top + HEIGHT, x, top + HEIGHT + 4))
        _draw_text(draw, (x, top + HEIGHT + 7), f"{value:g}", size=11, anchor="mt", fill=FAINT)
    _draw_text(draw, (LEFT + WIDTH + RIGHT - 8, top + HEIGHT + 7), "seconds", size=11, anchor="rt", fill=FAINT)
    for value in choose_ticks(rate / 2000, 6):
        y = top + HEIGHT * (1 - value / (rate / 2000))
        _draw_line(draw, (LEFT - 4, y, LEFT, y))
        _draw_text(draw, (LEFT - 8, y), f"{value:g}", size=11, anchor="rm", fill=FAINT)
    _draw_text(draw, (LEFT - 8, top - 9), "kHz", size=11, anchor="rs", fill=FAINT)
    box = [LEFT - 0.5, top - 0.5, LEFT + WIDTH, top + HEIGHT]
    draw.rectangle([round(value * SCALE) for value in box], outline=INK, width=1)


def _draw_scale(sheet: Any, draw: Any, top: int) -> None:
    """Draw the colour scale at the right."""
    Image = _import_pillow()[0]
    ramp = np.repeat(np.linspace(0, -RANGE_DECIBELS, HEIGHT * SCALE)[:, None], 10 * SCALE, axis=1)
    x = LEFT + WIDTH + 14
    sheet.paste(Image.fromarray(_map_colours(ramp)), (x * SCALE, top * SCALE))
    for value in range(0, RANGE_DECIBELS + 1, 20):
        y = top + HEIGHT * value / RANGE_DECIBELS
        y = min(max(y, top + 5), top + HEIGHT - 5)
        _draw_text(draw, (x + 16, y), "0 dB" if value == 0 else f"-{value}", size=11, anchor="lm", fill=FAINT)


def _draw_line(draw: Any, ends: tuple[float, float, float, float]) -> None:
    draw.line([round(value * SCALE) for value in ends], fill=FAINT, width=SCALE // 2)


def _draw_text(draw: Any, at: tuple[float, float], words: str, *, size: int, anchor: str, fill: str) -> None:
    font = _import_pillow()[2].load_default(size * SCALE)
    draw.text((at[0] * SCALE, at[1] * SCALE), words, font=font, anchor=anchor, fill=fill)


def _import_pillow() -> tuple[Any, Any, Any]:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise EnvironmentProblem(f"pictures need Pillow: pip install 'bottega[data]' ({error})") from error
    return Image, ImageDraw, ImageFont
