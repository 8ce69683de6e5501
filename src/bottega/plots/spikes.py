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

    With `images` (samples, height, width, channels) of any scale, each stands over its column with its caption, which is orange if
    the prediction is wrong.
    """
    num_steps, num_samples, _ = layers[0].shape
    visible_layers = [layer[:, :, :MAX_UNITS] > 0 for layer in layers]
    heights = [max(0.5, 0.018 * layer.shape[2]) for layer in visible_layers]
    column_width = max(0.75, 0.075 * num_steps)
    image_heights = [0.9] if images is not None else []
    width = max(column_width * num_samples + 1.2, 5.6)
    height = sum(heights) + sum(image_heights) + 0.16 * len(visible_layers) + 1.1
    with open_figure(path, width=width, height=height) as figure:
        grid = figure.subplots(
            len(image_heights) + len(visible_layers),
            num_samples,
            squeeze=False,
            height_ratios=[*image_heights, *heights],
        )
        if images is not None:
            _draw_images(grid[0], images, captions, is_correct)
        for number, (layer, row) in enumerate(zip(visible_layers, grid[len(image_heights) :], strict=True), start=1):
            for sample, axes in enumerate(row):
                axes.imshow(
                    layer[:, sample].T, cmap=_make_colormap(), vmin=0, vmax=1, aspect="auto", interpolation="nearest"
                )
                axes.set(xticks=[], yticks=[])
                axes.spines[:].set_visible(False)
            rate = f"{layers[number - 1].mean():.3f}"
            row[0].set_ylabel(f"layer {number}\n{rate}", rotation=0, ha="right", va="center")
        num_units = max(layer.shape[2] for layer in layers)
        figure.suptitle(f"Spikes over {num_steps} time steps", x=0.01, ha="left", fontsize=11)
        text = "a line is a unit; below the layer's name is its firing rate (spikes per unit and step)"
        text += (
            f"\nshown are the first {MAX_UNITS} of up to {num_units} units of a layer" if num_units > MAX_UNITS else ""
        )
        figure.supxlabel(text, x=0.01, ha="left", fontsize=8, color=MUTED)


def _draw_images(row: Sequence[Any], images: np.ndarray, captions: Sequence[str], is_correct: Sequence[bool]) -> None:
    low, high = float(images.min()), float(images.max())
    for axes, image, caption, is_image_correct in zip(row, images, captions, is_correct, strict=True):
        axes.imshow(image.mean(-1), cmap="gray", vmin=low, vmax=max(high, low + 1e-9), interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.set_xlabel(shorten(caption, 14), color=INK if is_image_correct else ORANGE, fontsize=8)
        axes.spines[:].set_visible(False)


def _make_colormap() -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap([BACKGROUND, BLUE])
