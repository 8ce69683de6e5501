"""A sheet of spectrograms shows what sounds, where it sounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bottega.data.audio.spectrogram_plot import (
    GAP,
    HEIGHT,
    LEFT,
    RANGE_DECIBELS,
    SCALE,
    TOP,
    WIDTH,
    _map_colours,
    choose_ticks,
    compute_decibels,
    plot_spectrogram,
    plot_spectrograms,
)

Image = pytest.importorskip("PIL.Image")
RATE = 16000


def tone(hertz: float, seconds: float = 1.0) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(round(RATE * seconds)) / RATE).astype(np.float32)


def test_a_tone_is_a_line_at_its_height(tmp_path: Path) -> None:
    path = tmp_path / "samples" / "tone.png"
    plot_spectrogram(tone(2000), RATE, path, title="2 kHz")
    with Image.open(path) as opened:
        pixels = np.asarray(opened.convert("L"), np.float64)
    top = (GAP + TOP) * SCALE
    inside = pixels[top + 4 : top + HEIGHT * SCALE - 4, (LEFT + 20) * SCALE : (LEFT + WIDTH - 20) * SCALE]
    line = inside.mean(1)
    # 2 of 8 kHz is a quarter of the height above the bottom.
    assert abs((line.argmax() + 4) / (HEIGHT * SCALE) - 0.75) < 0.01
    assert line.max() > 200
    assert np.median(line) < 30


def test_a_sheet_grows_with_its_sounds(tmp_path: Path) -> None:
    sounds = [("one", tone(440), RATE), ("two", np.zeros(0, np.float32), 8000), ("", tone(440, 0.001), RATE)]
    sizes = []
    for count in (1, 2, 3):
        plot_spectrograms(sounds[:count], tmp_path / "sheet.png")
        with Image.open(tmp_path / "sheet.png") as opened:
            sizes.append(opened.size)
    assert len({width for width, _ in sizes}) == 1
    assert sizes[2][1] - sizes[1][1] == sizes[1][1] - sizes[0][1] > HEIGHT * SCALE


def test_levels_are_below_the_loudest_and_silence_is_dark() -> None:
    level = compute_decibels(tone(1000), RATE, 200, 100)
    assert level.shape == (100, 200)
    assert level.max() == 0
    assert level.min() == -RANGE_DECIBELS
    np.testing.assert_array_equal(compute_decibels(np.zeros(5000, np.float32), RATE, 200, 100), -RANGE_DECIBELS)


def test_a_click_in_a_long_sound_is_seen() -> None:
    sound = np.zeros(RATE * 60, np.float32)
    sound[RATE * 30] = 1
    level = compute_decibels(sound, RATE, 100, 50)
    assert level[:, 49:51].max() == 0
    assert (level[:, :45] == -RANGE_DECIBELS).all()


def test_map_colours_grow_lighter_all_the_way() -> None:
    ramp = _map_colours(np.linspace(-RANGE_DECIBELS, 0, 256)[None])[0].astype(np.float64)
    lightness = ramp @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(lightness) >= 0).all()
    assert lightness[-1] - lightness[0] > 200


@pytest.mark.parametrize(
    ("top", "most", "expected"),
    [(8, 6, [0, 2, 4, 6, 8]), (1.9, 10, [0, 0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.4, 1.6, 1.8]), (0, 5, [0])],
)
def test_ticks_are_round(top: float, most: int, expected: list[float]) -> None:
    assert choose_ticks(top, most) == expected
