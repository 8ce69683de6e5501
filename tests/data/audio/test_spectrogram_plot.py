"""Spectrogram plots show each frequency at its position in time and height."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bottega.data.audio.spectrogram_plot import RANGE_DECIBELS, compute_decibels, plot_spectrogram, plot_spectrograms
from bottega.plots.spectrogram import COLOURS
from recorded_figures import list_texts, record_figures

Image = pytest.importorskip("PIL.Image")
RATE = 16000


def build_tone(hertz: float, seconds: float = 1.0) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(round(RATE * seconds)) / RATE).astype(np.float32)


def test_a_tone_is_a_line_at_its_frequency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = record_figures(monkeypatch)
    path = tmp_path / "samples" / "tone.png"
    plot_spectrogram(build_tone(2000), RATE, path, title="2 kHz")
    assert path.read_bytes().startswith(b"\x89PNG")
    image = figures[0].axes[0].images[0]
    line = np.asarray(image.get_array()).mean(1)
    # 2 of 8 kHz is a quarter of the height above the bottom.
    assert abs(line.argmax() / len(line) - 0.75) < 0.01
    assert image.get_extent() == [0, 1, 0, 8]
    assert "2 kHz" in list_texts(figures[0])


def test_plot_height_grows_with_the_number_of_waveforms(tmp_path: Path) -> None:
    waveforms = [
        ("one", build_tone(440), RATE),
        ("two", np.zeros(0, np.float32), 8000),
        ("", build_tone(440, 0.001), RATE),
    ]
    sizes = []
    for count in (1, 2, 3):
        plot_spectrograms(waveforms[:count], tmp_path / "plot.png")
        with Image.open(tmp_path / "plot.png") as image:
            sizes.append(image.size)
    assert len({width for width, _ in sizes}) == 1
    assert sizes[2][1] - sizes[1][1] == sizes[1][1] - sizes[0][1] > 200


def test_levels_are_relative_to_the_maximum_and_silence_is_the_floor() -> None:
    level = compute_decibels(build_tone(1000), RATE, 200, 100)
    assert level.shape == (100, 200)
    assert level.max() == 0
    assert level.min() == -RANGE_DECIBELS
    np.testing.assert_array_equal(compute_decibels(np.zeros(5000, np.float32), RATE, 200, 100), -RANGE_DECIBELS)


def test_click_in_long_audio_is_visible() -> None:
    audio = np.zeros(RATE * 60, np.float32)
    audio[RATE * 30] = 1
    level = compute_decibels(audio, RATE, 100, 50)
    assert level[:, 49:51].max() == 0
    assert (level[:, :45] == -RANGE_DECIBELS).all()


def test_colour_map_lightness_is_monotonic() -> None:
    colours = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in COLOURS])
    lightness = colours @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(lightness) > 0).all()
    assert lightness[-1] - lightness[0] > 200
