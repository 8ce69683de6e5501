"""Plots of a classifier's predictions: a confusion matrix, and a reliability diagram of its confidence."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bottega.plots.figure import BLUE, INK, LIGHT, MUTED, ORANGE, add_title, open_figure, shorten

MAX_NUMBERED_CLASSES = 24
"""Classes up to which a cell has room for its count."""
MAX_PLOTTED_CLASSES = 100
"""Beyond this, cells are too small to be seen."""
EMPTY_COLOUR = "#f6f6f9"


def plot_confusion_matrix(matrix: np.ndarray, classes: tuple[str, ...], path: Path) -> None:
    """Plot counts `matrix` (true class, predicted class); a cell's colour is its fraction of the row.

    If there are more than `MAX_PLOTTED_CLASSES` classes, those with the most errors are shown.
    """
    num_correct, total, selection_note = int(matrix.diagonal().sum()), int(matrix.sum()), ""
    fractions = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    if len(classes) > MAX_PLOTTED_CLASSES:
        errors = matrix.sum(0) + matrix.sum(1) - 2 * matrix.diagonal()
        worst = np.sort(np.argsort(-errors, kind="stable")[:MAX_PLOTTED_CLASSES])
        selection_note = f"; the {MAX_PLOTTED_CLASSES} of {len(classes):,} classes with the most errors"
        classes = tuple(classes[i] for i in worst)
        matrix, fractions = matrix[np.ix_(worst, worst)], fractions[np.ix_(worst, worst)]
    count = len(classes)
    names = [shorten(name, 18) for name in classes]
    cell_size = min(0.5, max(0.07, 6.4 / count))
    font_size = min(9.0, max(3.5, 30 * cell_size))
    side, label_width = cell_size * count, 0.09 * max(map(len, names)) * font_size / 9 + 0.5
    with open_figure(path, width=max(side + label_width + 0.3, 4.6), height=side + label_width + 1.0) as figure:
        axes = figure.add_subplot()
        # Square root, so that a few errors among many samples can be seen. Errors are orange, the diagonal blue.
        strength = np.sqrt(fractions)[:, :, None]
        colours = np.where(np.eye(count, dtype=bool)[:, :, None], _parse_rgb(BLUE), _parse_rgb(ORANGE))
        axes.imshow(_parse_rgb(EMPTY_COLOUR) + strength * (colours - _parse_rgb(EMPTY_COLOUR)), interpolation="nearest")
        if count <= MAX_NUMBERED_CLASSES:
            for row, column in np.argwhere(matrix > 0):
                colour = "white" if fractions[row, column] > 0.4 else INK
                value = f"{matrix[row, column]:,}"
                axes.text(column, row, value, ha="center", va="center", color=colour, fontsize=font_size)
        axes.set_xticks(range(count), names, rotation=90, fontsize=font_size)
        axes.set_yticks(range(count), names, fontsize=font_size)
        axes.tick_params(length=0)
        axes.set_xticks(np.arange(count + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(count + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=min(1.0, 8 * cell_size))
        axes.tick_params(which="minor", length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        accuracy = f"{100 * num_correct / max(total, 1):.1f} %"
        add_title(axes, "Confusion matrix", f"{num_correct:,} of {total:,} correct ({accuracy}){selection_note}")


def plot_calibration(
    edges: np.ndarray, counts: np.ndarray, confidence: np.ndarray, accuracy: np.ndarray, path: Path
) -> None:
    """Plot a reliability diagram from bins of the confidence: accuracy by bin, and below it the number of predictions in each bin.

    `edges` is (bins + 1), the others (bins); on the diagonal, confidence equals accuracy.
    """
    is_filled = counts > 0
    total, widths, centres = int(counts.sum()), np.diff(edges), (edges[:-1] + edges[1:]) / 2
    calibration_error = float((np.abs(accuracy - confidence)[is_filled] * counts[is_filled]).sum()) / max(total, 1)
    with open_figure(path, width=4.4, height=5.2) as figure:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        top.grid(True)
        top.bar(centres[is_filled], accuracy[is_filled], 0.9 * widths[is_filled], color=BLUE, label="accuracy")
        top.plot([0, 1], [0, 1], color=ORANGE, linewidth=1.5, label="perfect calibration")
        top.set(xlim=(0, 1), ylim=(0, 1), ylabel="accuracy")
        top.legend(loc="upper left")
        bottom.bar(centres[is_filled], counts[is_filled], 0.9 * widths[is_filled], color=LIGHT)
        bottom.set_xlabel("confidence (probability of the predicted class)")
        bottom.set_ylabel("predictions", color=MUTED)
        bottom.locator_params(axis="y", nbins=3, integer=True)
        figure.align_ylabels()
        add_title(top, "Calibration", f"{total:,} predictions; expected calibration error {calibration_error:.3f}")


def _parse_rgb(colour: str) -> np.ndarray:
    """Return the red, green and blue of "#rrggbb" between 0 and 1, (3,)."""
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
