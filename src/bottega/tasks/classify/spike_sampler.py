"""Raster plots of the spikes of a spiking classifier."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from bottega.config.recipe import Recipe
from bottega.core.types import Batch, Models
from bottega.data.tables.classes import Classes
from bottega.models.spiking.network import SpikingNet
from bottega.plots.figure import try_plot
from bottega.plots.spikes import plot_spikes
from bottega.tasks.sampler import Sampler
from bottega.tasks.table_data import TableData

RASTER_FILE = "sheet.png"


@final
class SpikeSampler(Sampler):
    """Raster plots of the spikes of held-out samples."""

    def __init__(self, recipe: Recipe, classes: Classes, data: TableData) -> None:
        self.recipe, self.classes, self.data = recipe, classes, data

    def sample(self, models: Models, folder: Path, *, device: Any) -> None:
        """Write a raster plot of validation samples, or of training samples if none are held out."""
        held_out = self.data.validation()
        source = held_out if held_out is not None else self.data.training()
        index = np.arange(min(self.recipe.samples.count, len(source)))
        rows = source.rows(index, np.zeros_like(index))
        write_raster(models["model"], rows, self.classes, folder, device=device)


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
        captions=[
            name if name == label else f"{name}, is {label}" for name, label in zip(predicted, labels, strict=True)
        ],
        is_correct=[name == label for name, label in zip(predicted, labels, strict=True)],
    )
    try_plot(plot, folder / RASTER_FILE)
