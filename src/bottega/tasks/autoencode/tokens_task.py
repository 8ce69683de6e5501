"""The loss of a tokenizer: reconstruction through discrete codes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pydantic import Field

from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Batch, Loss, Models
from bottega.models.autoencoder.config import CodesShape
from bottega.tasks.autoencode.vae_task import (
    Distance,
    add_psnr,
    build_example_mask,
    compute_reconstruction_errors,
    count_examples,
)


class Codes(Task):
    """Reconstruction through a quantiser.

    A batch holds `key` (b, *grid, channels) and optionally `weight` (b,), where 0 marks padding rows.
    """

    key: str
    """Batch field with the data: image or mel."""
    shape: CodesShape
    distance: Distance = "l1"
    commitment_weight: float = Field(default=0.25, ge=0.0)
    """Weight of the commitment loss; ignored by FSQ, which has no learned codebook."""
    value_range: float = Field(default=2.0, gt=0.0)
    """Largest minus smallest possible value of the data, for PSNR."""
    pretrained: str | None = None
    """Folder of a saved tokenizer whose weights training starts from."""

    def specs(self) -> dict[str, ModelSpec]:
        architecture = "bottega.models.autoencoder.codes:CodeAutoencoder"
        initial = Initial("bottega.models.autoencoder.codes:CodeAutoencoder.initialise")
        model = ModelSpec(architecture, self.shape, initial=initial, pretrained=self.pretrained, is_filled=True)
        return {"model": model}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        terms = ("loss",) if self.shape.levels is not None else ("loss", "codebook", "commitment")
        return dict.fromkeys(terms, count_examples(batch, self.key))

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        x = batch[self.key]
        reconstruction, _, codebook, commitment = models["model"](x)
        mask = build_example_mask(batch, x)
        terms = {"loss": ((compute_reconstruction_errors(reconstruction, x, self.distance) * mask).sum(), 1.0)}
        if self.shape.levels is None:
            terms["codebook"] = ((codebook * mask).sum(), 1.0)
            terms["commitment"] = ((commitment * mask).sum(), self.commitment_weight)
        # The number of codes in use is not a sum over examples, so `measure_code_usage` counts it after an evaluation.
        return Loss(
            terms=terms,
            metrics={
                "mse": ((compute_reconstruction_errors(reconstruction.detach(), x, "l2") * mask).sum(), mask.sum())
            },
        )

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add PSNR to the means of the metrics."""
        return add_psnr(metrics, self.value_range)


def measure_code_usage(codes: np.ndarray, num_codes: int) -> dict[str, float]:
    """Return `codes_used`, the fraction of codes that a dataset uses, and `code_perplexity` (at most `num_codes`)."""
    frequencies = np.bincount(codes.reshape(-1), minlength=num_codes) / codes.size
    used_frequencies = frequencies[frequencies > 0]
    return {
        "codes_used": len(used_frequencies) / num_codes,
        "code_perplexity": float(np.exp(-(used_frequencies * np.log(used_frequencies)).sum())),
    }
