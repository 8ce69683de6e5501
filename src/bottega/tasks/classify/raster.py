"""A raster: for each picture, which units of which layer fire in which time step, one under the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from bottega.core.types import Batch
from bottega.data.image.canvas import BLUE, FAINT, GRID, INK, ORANGE, Canvas
from bottega.data.tables.classes import Classes
from bottega.models.spiking.network import SpikingNet

FILE = "sheet.png"
MOST_UNITS = 128
"""Of a layer: more lines than that cannot be told apart."""
STEP, LINE = 9.0, 2.0
"""Width of a time step and height of a unit."""
PIXELS = 64.0
"""Side of the picture itself."""
MARGIN, TOP, GAP = 70.0, 130.0, 16.0


def write(model: SpikingNet, batch: Batch, classes: Classes, folder: Path, *, device: Any) -> None:
    """sheet.png: a column for each sample of the batch, its picture over its spikes, from the first layer down."""
    pictures = np.asarray(batch["image"], np.float32)
    with torch.no_grad():
        told = model(torch.from_numpy(pictures).to(device))
    trains = [one[:, :, :MOST_UNITS].cpu().numpy() > 0 for one in told.spikes]
    names = [classes.names[number] for number in told.logits.argmax(1).tolist()]
    truths = [classes.names[number] for number in np.asarray(batch["label"]).tolist()]
    draw(pictures, trains, names, truths, folder / FILE)


def draw(pictures: np.ndarray, trains: list[np.ndarray], answers: list[str], truths: list[str], path: Path) -> None:
    """`pictures` [B, H, W, C] of any scale, `trains` [S, B, N] of each layer."""
    steps = len(trains[0])
    column = max(PIXELS, STEP * steps) + GAP
    heights = [LINE * one.shape[2] for one in trains]
    width = max(MARGIN + column * len(pictures), 420)
    page = Canvas(width, TOP + sum(heights) + GAP * len(trains) + 26)
    page.draw_text(12, 18, f"which units fire in which of {steps} time steps", anchor="lm", size=15)
    low, high = float(pictures.min()), float(pictures.max())
    for number, (picture, answer, truth) in enumerate(zip(pictures, answers, truths, strict=True)):
        left = MARGIN + column * number
        _picture(page, left, 34, (picture - low) / max(high - low, 1e-9))
        said = answer if answer == truth else f"{answer}, is {truth}"
        page.draw_text(left, 34 + PIXELS + 12, said[:14], anchor="lm", fill=INK if answer == truth else ORANGE)
    top = TOP
    for layer, (train, height) in enumerate(zip(trains, heights, strict=True)):
        page.draw_text(12, top + 8, f"layer {layer + 1}", anchor="lm", fill=FAINT)
        page.draw_text(12, top + 24, f"{train.mean():.3f}", anchor="lm", size=11, fill=FAINT)
        for number in range(len(pictures)):
            left = MARGIN + column * number
            page.draw_box(left, top, left + STEP * steps, top + height, GRID)
            for step, unit in np.argwhere(train[:, number]):
                x, y = left + STEP * step, top + LINE * unit
                page.draw_box(x + 1, y, x + STEP - 1, y + LINE - 0.5, BLUE)
        top += height + GAP
    page.draw_text(
        12, top, "time goes right; a line is a unit; the number is the firing rate", anchor="lm", size=11, fill=FAINT
    )
    page.save(path)


def _picture(page: Canvas, left: float, top: float, shares: np.ndarray) -> None:
    """Grey, as large as `PIXELS` allows."""
    grey = np.rint(255 * shares.mean(-1)).astype(int)
    size = PIXELS / max(grey.shape)
    for (row, place), tone in np.ndenumerate(grey):
        x, y = left + size * place, top + size * row
        page.draw_box(x, y, x + size, y + size, f"#{tone:02x}{tone:02x}{tone:02x}")
