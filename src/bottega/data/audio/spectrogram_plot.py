"""Sounds to look at: spectrograms with their axes in one PNG, drawn with Pillow alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bottega.core.errors import EnvironmentProblem
from bottega.data.audio.spectrogram import stft
from bottega.data.image.caption import to_printable

# From silence to loud; lightness rises all the way, so that it also reads in grey and for the colour-blind.
ANCHORS = ("#0b0a1e", "#2a1a5e", "#6a1f7b", "#b5306b", "#ec6a4c", "#fbb35a", "#fdf3c0")
PAPER, INK, FAINT = "#ffffff", "#1c1b29", "#6d6b7b"
RANGE_DECIBELS = 80
WIDTH, HEIGHT = 880, 220
LEFT, RIGHT, TOP, BOTTOM, GAP = 74, 84, 34, 34, 10
SCALE = 2
"""Pixels drawn for each of the above, so that letters are sharp on today's screens."""

TitledWaveform = tuple[str, np.ndarray, int]
"""Title, samples [n], sample rate."""


def plot_spectrogram(samples: np.ndarray, rate: int, path: Path, *, title: str | None = None) -> None:
    plot_spectrograms([(title or "", samples, rate)], path)


def plot_spectrograms(waveforms: Sequence[TitledWaveform], path: Path) -> None:
    """One under the other, each with its own time and frequency axis, in decibels below its loudest point."""
    assert waveforms, "a sheet of no sounds"
    Image, ImageDraw, _ = _pillow()
    row = TOP + HEIGHT + BOTTOM
    size = (LEFT + WIDTH + RIGHT, row * len(waveforms) + GAP * 2)
    sheet = Image.new("RGB", (size[0] * SCALE, size[1] * SCALE), PAPER)
    draw = ImageDraw.Draw(sheet)
    for place, (title, samples, rate) in enumerate(waveforms):
        top = GAP + place * row + TOP
        mono = (samples if samples.ndim == 1 else samples.mean(1)).astype(np.float32)
        picture = Image.fromarray(_colours(compute_decibels(mono, rate, WIDTH * SCALE, HEIGHT * SCALE)))
        sheet.paste(picture, (LEFT * SCALE, top * SCALE))
        _axes(draw, top, seconds=len(mono) / rate, rate=rate)
        _text(draw, (LEFT, top - 9), to_printable(title), size=14, anchor="ls", fill=INK)
        peak = float(np.abs(mono).max(initial=0))
        level = f"peak {20 * np.log10(peak):.1f} dB" if peak > 1e-6 else "silent"
        about = f"{len(mono) / rate:.2f} s   {rate:,} Hz   {level}"
        _text(draw, (LEFT + WIDTH, top - 9), about, size=11, anchor="rs", fill=FAINT)
        _scale(sheet, draw, top)
    path.parent.mkdir(parents=True, exist_ok=True)
    # 256 colours: the picture has hardly more, and the file is half the size.
    sheet.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)


def compute_decibels(audio: np.ndarray, rate: int, width: int, height: int) -> np.ndarray:
    """[height, width], 0 at the loudest point, -RANGE_DECIBELS at the least, the highest frequency on top.

    A window is about 32 ms: shorter ones smear the harmonics of a voice, longer ones its consonants.
    """
    fft_size = max(64, 1 << round(np.log2(rate * 0.032)))
    hop_size = max(1, min(fft_size // 4, -(-len(audio) // width)))
    magnitude = np.abs(stft(audio if len(audio) else np.zeros(1, np.float32), fft_size=fft_size, hop_size=hop_size))
    # The loudest moment of each column is shown, so that a click in a long sound does not fall between two columns.
    columns = np.linspace(0, len(magnitude), width + 1)
    starts, place = np.unique(np.minimum(columns[:-1].astype(int), len(magnitude) - 1), return_inverse=True)
    peaks = np.maximum.reduceat(magnitude, starts, axis=0)[place]
    bins = np.linspace(fft_size // 2, 0, height)
    low = np.minimum(bins.astype(int), fft_size // 2 - 1)
    part = (bins - low).astype(np.float32)[:, None]
    level = 20 * np.log10(np.maximum(peaks.T, 1e-7))
    level = level[low] * (1 - part) + level[low + 1] * part
    # A silent sound stays dark: its rounding noise is not blown up to full brightness.
    return np.clip(level - max(level.max(), -40), -RANGE_DECIBELS, 0)


def _colours(level: np.ndarray) -> np.ndarray:
    """uint8 [h, w, 3] of decibels."""
    anchors = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in ANCHORS], np.float64)
    place = np.linspace(0, len(anchors) - 1, 256)
    table = np.stack([np.interp(place, range(len(anchors)), anchors[:, i]) for i in range(3)], axis=1)
    return table.round().astype(np.uint8)[((level / RANGE_DECIBELS + 1) * 255).astype(np.uint8)]


def choose_ticks(top: float, max_steps: int) -> list[float]:
    """Round values from 0 to `top`, at most so many steps of 1, 2 or 5 times a power of ten."""
    if top <= 0:
        return [0.0]
    power = 10 ** np.floor(np.log10(top / max_steps))
    step = next(float(power * times) for times in (1, 2, 5, 10) if top / (power * times) <= max_steps)
    return [round(step * i, 10) for i in range(int(top / step + 1e-9) + 1)]


def _axes(draw: Any, top: int, *, seconds: float, rate: int) -> None:
    for value in choose_ticks(seconds, 10):
        x = LEFT + WIDTH * value / seconds if seconds else LEFT
        _line(draw, (x, top + HEIGHT, x, top + HEIGHT + 4))
        _text(draw, (x, top + HEIGHT + 7), f"{value:g}", size=11, anchor="mt", fill=FAINT)
    _text(draw, (LEFT + WIDTH + RIGHT - 8, top + HEIGHT + 7), "seconds", size=11, anchor="rt", fill=FAINT)
    for value in choose_ticks(rate / 2000, 6):
        y = top + HEIGHT * (1 - value / (rate / 2000))
        _line(draw, (LEFT - 4, y, LEFT, y))
        _text(draw, (LEFT - 8, y), f"{value:g}", size=11, anchor="rm", fill=FAINT)
    _text(draw, (LEFT - 8, top - 9), "kHz", size=11, anchor="rs", fill=FAINT)
    box = [LEFT - 0.5, top - 0.5, LEFT + WIDTH, top + HEIGHT]
    draw.rectangle([round(value * SCALE) for value in box], outline=INK, width=1)


def _scale(sheet: Any, draw: Any, top: int) -> None:
    """What the colours mean, at the right."""
    Image = _pillow()[0]
    ramp = np.repeat(np.linspace(0, -RANGE_DECIBELS, HEIGHT * SCALE)[:, None], 10 * SCALE, axis=1)
    x = LEFT + WIDTH + 14
    sheet.paste(Image.fromarray(_colours(ramp)), (x * SCALE, top * SCALE))
    for value in range(0, RANGE_DECIBELS + 1, 20):
        y = top + HEIGHT * value / RANGE_DECIBELS
        y = min(max(y, top + 5), top + HEIGHT - 5)
        _text(draw, (x + 16, y), "0 dB" if value == 0 else f"-{value}", size=11, anchor="lm", fill=FAINT)


def _line(draw: Any, ends: tuple[float, float, float, float]) -> None:
    draw.line([round(value * SCALE) for value in ends], fill=FAINT, width=SCALE // 2)


def _text(draw: Any, at: tuple[float, float], words: str, *, size: int, anchor: str, fill: str) -> None:
    font = _pillow()[2].load_default(size * SCALE)
    draw.text((at[0] * SCALE, at[1] * SCALE), words, font=font, anchor=anchor, fill=fill)


def _pillow() -> tuple[Any, Any, Any]:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise EnvironmentProblem(f"pictures need Pillow: pip install 'bottega[data]' ({error})") from error
    return Image, ImageDraw, ImageFont
