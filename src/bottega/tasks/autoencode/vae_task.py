"""The loss of a variational autoencoder: reconstruction and KL divergence from a unit normal."""

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
    """Reconstruction through continuous latents.

    A batch holds `key` (b, *grid, channels) and optionally `weight` (b,), where 0 marks padding rows.
    """

    key: str
    """Batch field with the data, such as image, mel or video."""
    shape: AutoencoderShape
    kl_weight: float = Field(default=1e-6, ge=0.0)
    """Weight of the KL divergence, in nats per value of the data. Latent diffusion sums the error and the divergence over all
    values, which gives the same ratio of the two terms."""
    distance: Distance = "l1"
    value_range: float = Field(default=2.0, gt=0.0)
    """Largest minus smallest possible value of the data, for PSNR."""
    pretrained: str | None = None
    """Folder of a saved autoencoder whose weights training starts from."""

    def specs(self) -> dict[str, ModelSpec]:
        if self.pretrained is not None:
            architecture = "bottega.models.autoencoder.torch:build_autoencoder"
            return {"model": ModelSpec(architecture, self.shape, pretrained=self.pretrained, load=None)}
        architecture = "bottega.models.autoencoder.torch:Autoencoder"
        initial = Initial("bottega.models.autoencoder.torch:Autoencoder.initialise")
        return {"model": ModelSpec(architecture, self.shape, initial=initial, is_filled=True)}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        return dict.fromkeys(("loss", "kl"), count_examples(batch, self.key))

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        x = flatten_bands(batch[self.key], self.shape)
        noise = rng.normal("latent", self.shape.latent_shape(x.shape[1:-1]))
        reconstruction, mean, log_variance = models["model"](x, noise)
        mask = build_example_mask(batch, x)
        error = (compute_reconstruction_errors(reconstruction, x, self.distance) * mask).sum()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance).flatten(1).sum(1)
        kl = (divergence / x[0].numel() * mask).sum()
        squared_error = (compute_reconstruction_errors(reconstruction.detach(), x, "l2") * mask).sum()
        size = mask.sum()
        return Loss(
            terms={"loss": (error, 1.0), "kl": (kl, self.kl_weight)},
            metrics={"mse": (squared_error, size), "kl": (kl.detach(), size)},
        )

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add PSNR to the means of the metrics."""
        return add_psnr(metrics, self.value_range)


def flatten_bands(x: Tensor, shape: AutoencoderShape) -> Tensor:
    """Flatten trailing axes into channels: for a model over time alone, mel bands (b, T, M, 1) become (b, T, M)."""
    return x.flatten(1 + shape.dims)


def count_examples(batch: Batch, key: str) -> float:
    """Return the number of examples of a host batch without padding rows."""
    return float((np.asarray(batch["weight"]) > 0).sum()) if "weight" in batch else float(len(batch[key]))


def build_example_mask(batch: Batch, x: Tensor) -> Tensor:
    """Return a mask, float32 (b,): 0 for padding rows, else 1."""
    if "weight" in batch:
        return (batch["weight"] > 0).float()
    return torch.ones(len(x), device=x.device)


def compute_reconstruction_errors(reconstruction: Tensor, x: Tensor, distance: Distance) -> Tensor:
    """Return the mean absolute or squared error of each example, (b,)."""
    difference = reconstruction.float() - x.float()
    return (difference.abs() if distance == "l1" else difference.square()).flatten(1).mean(1)


def add_psnr(metrics: Mapping[str, float], value_range: float) -> dict[str, float]:
    """Return metrics with the PSNR of the mean squared error over all data, not the mean of per-example PSNRs."""
    if "mse" not in metrics:
        return dict(metrics)
    mse = metrics["mse"]
    return {**metrics, "psnr": 10.0 * math.log10(value_range**2 / mse) if mse > 0 else math.inf}
