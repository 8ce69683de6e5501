"""Reconstruction through latents: data to a small continuous grid and back, with a pull towards a unit normal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Batch, Loss, Models
from bottega.models.autoencoder.config import AutoencoderShape

Distance = Literal["l1", "l2"]


class Reconstruction(Task):
    """A batch holds `key` [b, *grid, C]. Optional: `weight` [b], where 0 marks a padding row that counts nowhere."""

    key: str
    """The field with the data, such as image, mel or video."""
    shape: AutoencoderShape
    kl_weight: float = Field(default=1e-6, ge=0.0)
    """The weight of the divergence, in nats for each value of the data: that of latent diffusion, which has both the
    error and the divergence as sums."""
    distance: Distance = "l1"
    value_range: float = Field(default=2.0, gt=0.0)
    """The largest value of the data less the smallest: what PSNR is relative to."""
    pretrained: str | None = None
    """A folder of a saved autoencoder whose weights the training starts from."""

    def specs(self) -> dict[str, ModelSpec]:
        if self.pretrained is not None:
            architecture = "bottega.models.autoencoder.vae:start_autoencoder"
            return {"model": ModelSpec(architecture, self.shape, pretrained=self.pretrained, load=None)}
        architecture = "bottega.models.autoencoder.vae:Autoencoder"
        initial = Initial("bottega.models.autoencoder.vae:Autoencoder.initialise")
        return {"model": ModelSpec(architecture, self.shape, initial=initial, is_filled=True)}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        return dict.fromkeys(("loss", "kl"), num_examples(batch, self.key))

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        x = flatten_bands(batch[self.key], self.shape)
        noise = rng.normal("latent", self.shape.latent_shape(x.shape[1:-1]))
        found, mean, log_variance = models["model"](x, noise)
        kept = example_mask(batch, x)
        error = (reconstruction_errors(found, x, self.distance) * kept).sum()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).flatten(1).sum(1)
        kl = (divergence / x[0].numel() * kept).sum()
        squared = (reconstruction_errors(found.detach(), x, "l2") * kept).sum()
        size = kept.sum()
        return Loss(
            terms={"loss": (error, 1.0), "kl": (kl, self.kl_weight)},
            metrics={"mse": (squared, size), "kl": (kl.detach(), size)},
        )

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """What people read off the means."""
        return add_psnr(metrics, self.value_range)


def flatten_bands(x: Tensor, shape: AutoencoderShape) -> Tensor:
    """Data as a model over these axes reads them: to one over time alone, bands [b, T, M, 1] are channels [b, T, M]."""
    return x.flatten(1 + shape.dims)


def num_examples(batch: Batch, key: str) -> float:
    """Of a host batch, those that count."""
    return float((np.asarray(batch["weight"]) > 0).sum()) if "weight" in batch else float(len(batch[key]))


def example_mask(batch: Batch, x: Tensor) -> Tensor:
    """float32 [b]: 1 for a row that counts, else 0."""
    if "weight" in batch:
        return (batch["weight"] > 0).float()
    return torch.ones(len(x), device=x.device)


def reconstruction_errors(found: Tensor, x: Tensor, distance: Distance) -> Tensor:
    """The mean over the values of each example, [b]."""
    difference = found.float() - x.float()
    return (difference.abs() if distance == "l1" else difference.square()).flatten(1).mean(1)


def add_psnr(metrics: Mapping[str, float], value_range: float) -> dict[str, float]:
    """Adds the PSNR of the mean squared error over all data, which is below the mean of the PSNR of each example."""
    if "mse" not in metrics:
        return dict(metrics)
    mse = metrics["mse"]
    return {**metrics, "psnr": 10.0 * math.log10(value_range**2 / mse) if mse > 0 else math.inf}
