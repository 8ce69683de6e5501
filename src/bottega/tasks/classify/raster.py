"""Raster plot of a spiking classifier: the spikes of held-out samples below their images and predictions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bottega.core.types import Batch
from bottega.data.tables.classes import Classes
from bottega.models.spiking.network import SpikingNet
from bottega.plots.figure import try_plot
from bottega.plots.spikes import plot_spikes

PLOT_FILE = "sheet.png"


def write_raster(model: SpikingNet, batch: Batch, classes: Classes, folder: Path, *, device: Any) -> None:
    """Write sheet.png: a column for each sample of the batch, its image above its spikes, from the first layer down."""
    images = np.asarray(batch["image"], np.float32)
    with torch.no_grad():
        output = model(torch.from_numpy(images).to(device))
    predicted = [classes.names[number] for number in output.logits.argmax(1).tolist()]
    labels = [classes.names[number] for number in np.asarray(batch["label"]).tolist()]
    plot = partial(
        plot_spikes,
        [spikes.cpu().numpy() for spikes in output.spikes],
        images=images,
        captions=[p if p == label else f"{p}, is {label}" for p, label in zip(predicted, labels, strict=True)],
        is_correct=[p == label for p, label in zip(predicted, labels, strict=True)],
    )
    try_plot(plot, folder / PLOT_FILE)
