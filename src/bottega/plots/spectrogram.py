"""Spectrograms of audio, one below the other, each with its time and frequency axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bottega.plots.figure import INK, MUTED, open_figure, shorten

# From silence to loud; lightness rises all the way, so that it also reads in greyscale and for colour-blind readers.
COLOURS = ("#0b0a1e", "#2a1a5e", "#6a1f7b", "#b5306b", "#ec6a4c", "#fbb35a", "#fdf3c0")


@dataclass(frozen=True)
class Panel:
    """One spectrogram: `levels` (frequencies, columns) in decibels, the highest frequency first.

    `seconds` and `kilohertz` are the ends of its axes.
    """

    title: str
    note: str
    """Stands at the right of the title."""
    levels: np.ndarray
    seconds: float
    kilohertz: float


def plot_panels(panels: Sequence[Panel], path: Path, *, range_decibels: float) -> None:
    """Plot spectrograms on one colour scale from -range_decibels to 0."""
    with open_figure(path, width=7.2, height=1.95 * len(panels) + 0.2) as figure:
        from matplotlib.colors import LinearSegmentedColormap

        colours = LinearSegmentedColormap.from_list("spectrogram", COLOURS)
        grid = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, panel in zip(grid, panels, strict=True):
            extent = (0, panel.seconds or 1, 0, panel.kilohertz)
            image = axes.imshow(panel.levels, cmap=colours, vmin=-range_decibels, vmax=0, aspect="auto", extent=extent)
            axes.set_title(shorten(panel.title, 70), fontsize=9.5, color=INK, pad=5)
            axes.set_title(panel.note, fontsize=8, color=MUTED, pad=5, loc="right")
            axes.set(xlabel="seconds", ylabel="kHz")
            axes.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=list(grid), fraction=0.03, pad=0.01, aspect=16 * len(panels), label="dB")
        bar.outline.set_visible(False)
