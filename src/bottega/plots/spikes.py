"""Raster plots of spiking networks: which unit of which layer fires in which time step, sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bottega.plots.figure import BLUE, INK, MUTED, ORANGE, open_figure, shorten

MAX_UNITS = 128
"""Units of a layer that are shown: more lines cannot be distinguished."""
BACKGROUND = "#f3f3f7"


def plot_spikes(
    layers: Sequence[np.ndarray],
    path: Path,
    *,
    images: np.ndarray | None = None,
    captions: Sequence[str] = (),
    is_correct: Sequence[bool] = (),
) -> None:
    """Plot spikes, (steps, samples, units) of each layer: a column for each sample, a row for each layer, a line for each unit.

    With `images` (samples, height, width, channels) of any scale, each stands over its column with its caption, in orange where the
    prediction is wrong.
    """
    steps, samples, _ = layers[0].shape
    shown = [layer[:, :, :MAX_UNITS] > 0 for layer in layers]
    heights = [max(0.5, 0.018 * layer.shape[2]) for layer in shown]
    column = max(0.75, 0.075 * steps)
    picture = [0.9] if images is not None else []
    width, height = max(column * samples + 1.2, 5.6), sum(heights) + sum(picture) + 0.16 * len(shown) + 1.1
    with open_figure(path, width=width, height=height) as figure:
        grid = figure.subplots(len(picture) + len(shown), samples, squeeze=False, height_ratios=[*picture, *heights])
        if images is not None:
            _draw_images(grid[0], images, captions, is_correct)
        for number, (layer, row) in enumerate(zip(shown, grid[len(picture) :], strict=True), start=1):
            for sample, axes in enumerate(row):
                axes.imshow(layer[:, sample].T, cmap=_colours(), vmin=0, vmax=1, aspect="auto", interpolation="nearest")
                axes.set(xticks=[], yticks=[])
                axes.spines[:].set_visible(False)
            rate = f"{layers[number - 1].mean():.3f}"
            row[0].set_ylabel(f"layer {number}\n{rate}", rotation=0, ha="right", va="center")
        num_units = max(layer.shape[2] for layer in layers)
        figure.suptitle(f"Spikes over {steps} time steps", x=0.01, ha="left", fontsize=11)
        text = "a line is a unit; below the layer's name is its firing rate (spikes per unit and step)"
        text += (
            f"\nshown are the first {MAX_UNITS} of up to {num_units} units of a layer" if num_units > MAX_UNITS else ""
        )
        figure.supxlabel(text, x=0.01, ha="left", fontsize=8, color=MUTED)


def _draw_images(row: Sequence[Any], images: np.ndarray, captions: Sequence[str], is_correct: Sequence[bool]) -> None:
    low, high = float(images.min()), float(images.max())
    for axes, image, caption, correct in zip(row, images, captions, is_correct, strict=True):
        axes.imshow(image.mean(-1), cmap="gray", vmin=low, vmax=max(high, low + 1e-9), interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.set_xlabel(shorten(caption, 14), color=INK if correct else ORANGE, fontsize=8)
        axes.spines[:].set_visible(False)


def _colours() -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap([BACKGROUND, BLUE])
