"""Pictures of a classifier's answers: who was taken for whom, and how sure it was beside how often it was right."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from bottega.data.image.canvas import BLUE, FAINT, GRID, INK, ORANGE, PAPER, SCALE, Canvas
from bottega.tasks.measures.classification import Reliability

MAX_NUMBERED_CLASSES = 24
"""Classes up to which a cell has room for its number."""
MAX_PLOTTED_CLASSES = 100
"""Classes that one can look at: a picture of 500 had 36 million pixels."""


def plot_confusion_matrix(matrix: np.ndarray, classes: tuple[str, ...], path: Path) -> None:
    """Rows are what examples are, columns what they were taken for; colour is the share of the row."""
    right, total, shown = int(matrix.diagonal().sum()), int(matrix.sum()), ""
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    if len(classes) > MAX_PLOTTED_CLASSES:
        wrong = matrix.sum(0) + matrix.sum(1) - 2 * matrix.diagonal()
        kept = np.sort(np.argsort(-wrong, kind="stable")[:MAX_PLOTTED_CLASSES])
        shown = f"; the {MAX_PLOTTED_CLASSES} of {len(classes):,} classes with most mistakes"
        classes = tuple(classes[i] for i in kept)
        matrix, shares = matrix[np.ix_(kept, kept)], shares[np.ix_(kept, kept)]
    count = len(classes)
    cell = min(44.0, max(6.0, 640 / count))
    size = min(12.0, max(5.0, 0.42 * cell))
    names = [name if len(name) <= 18 else f"{name[:17]}…" for name in classes]
    probe = Canvas(1, 1)
    left = 30 + max(probe.measure_text(name, size) for name in names)
    top, side = 64.0, cell * count
    below = 26 + max(probe.measure_text(name, size) for name in names)
    page = Canvas(max(left + side + 24, 360), top + side + below)
    page.draw_text(left, 20, "which class was taken for which", anchor="lm", size=16)
    page.draw_text(
        left, 42, f"{right:,} of {total:,} right; a row is what examples are{shown}", anchor="lm", fill=FAINT
    )
    for row in range(count):
        y = top + cell * (row + 0.5)
        page.draw_text(left - 8, y, names[row], anchor="rm", size=size, fill=FAINT)
        for column in range(count):
            x = left + cell * column
            tone = BLUE if row == column else ORANGE
            page.draw_box(
                x + 0.5, y - cell / 2 + 0.5, x + cell - 0.5, y + cell / 2 - 0.5, _mixed(tone, shares[row, column])
            )
            if count <= MAX_NUMBERED_CLASSES and matrix[row, column]:
                fill = PAPER if shares[row, column] > 0.55 else INK
                page.draw_text(x + cell / 2, y, f"{matrix[row, column]:,}", size=size, fill=fill)
    for column in range(count):
        _upright(page, left + cell * (column + 0.5), top + side + 8, names[column], size)
    page.save(path)


def _upright(page: Canvas, x: float, y: float, words: str, size: float) -> None:
    """Read from below, so that long names of narrow columns fit."""
    width, height = math.ceil(page.measure_text(words, size)) + 2, math.ceil(1.6 * size)
    label = Canvas(width, height)
    label.draw_text(width, height / 2, words, anchor="rm", size=size, fill=FAINT)
    page.image.paste(label.image.rotate(90, expand=True), (round((x - height / 2) * SCALE), round(y * SCALE)))


def plot_calibration(found: Reliability, path: Path) -> None:
    """A bar a bin, as high as the share that was right; on the line, it was as sure as it was right."""
    left, top, side = 62.0, 64.0, 300.0
    page = Canvas(left + side + 30, top + side + 104)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + side * x, top + side * (1 - y)

    filled = found.counts > 0
    total = int(found.counts.sum())
    off = float((np.abs(found.accuracy - found.confidence)[filled] * found.counts[filled]).sum()) / max(total, 1)
    page.draw_text(left, 20, "how sure, and how often right", anchor="lm", size=16)
    page.draw_text(left, 42, f"{total:,} answers; expected calibration error {off:.3f}", anchor="lm", fill=FAINT)
    for mark in (0.0, 0.25, 0.5, 0.75, 1.0):
        page.draw_line(*place(0, mark), *place(1, mark), fill=GRID)
        page.draw_text(left - 8, place(0, mark)[1], f"{mark:g}", anchor="rm", size=11, fill=FAINT)
        page.draw_text(place(mark, 0)[0], top + side + 74, f"{mark:g}", size=11, fill=FAINT)
    for i in np.flatnonzero(filled):
        low, high = found.edges[i], found.edges[i + 1]
        (x0, y0), (x1, _) = place(low, float(found.accuracy[i])), place(high, 0)
        page.draw_box(x0 + 1, y0, x1 - 1, top + side, BLUE)
        share = found.counts[i] / found.counts.max()
        page.draw_box(x0 + 1, top + side + 60 - 44 * share, x1 - 1, top + side + 60, "#c9c8d3")
    page.draw_line(*place(0, 0), *place(1, 1), fill=ORANGE, thick=1.5)
    page.draw_text(left + side / 2, top + side + 93, "how sure it was; grey: how many answers", size=11, fill=FAINT)
    page.save(path)


def _mixed(colour: str, share: float) -> str:
    """From paper to the colour; the square root, so that a few errors among many can be seen."""
    amount = math.sqrt(min(1.0, max(0.0, float(share))))
    ends = [[int(one[i : i + 2], 16) for i in (1, 3, 5)] for one in (PAPER, colour)]
    return "#" + "".join(f"{round(a + (b - a) * amount):02x}" for a, b in zip(*ends, strict=True))
