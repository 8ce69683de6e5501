"""Reconstruction through codes: data to a small grid of whole numbers and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pydantic import Field

from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Batch, Loss, Models
from bottega.models.autoencoder.config import CodesShape
from bottega.tasks.autoencode.vae_task import Distance, add_psnr, example_mask, num_examples, reconstruction_errors


class Codes(Task):
    """A batch holds `key` [b, *grid, C]. Optional: `weight` [b], where 0 marks a padding row that counts nowhere."""

    key: str
    shape: CodesShape
    distance: Distance = "l1"
    commitment_weight: float = Field(default=0.25, ge=0.0)
    """The pull of the encoder towards its code; finite scalars have no codebook and need none."""
    value_range: float = Field(default=2.0, gt=0.0)
    """The largest value of the data less the smallest: what PSNR is relative to."""
    pretrained: str | None = None
    """A folder of a saved tokenizer whose weights the training starts from."""

    def specs(self) -> dict[str, ModelSpec]:
        architecture = "bottega.models.autoencoder.codes:CodeAutoencoder"
        initial = Initial("bottega.models.autoencoder.codes:CodeAutoencoder.initialise")
        model = ModelSpec(architecture, self.shape, initial=initial, pretrained=self.pretrained, is_filled=True)
        return {"model": model}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        terms = ("loss",) if self.shape.levels is not None else ("loss", "codebook", "commitment")
        return dict.fromkeys(terms, num_examples(batch, self.key))

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        x = batch[self.key]
        found, _, codebook, commitment = models["model"](x)
        kept = example_mask(batch, x)
        terms = {"loss": ((reconstruction_errors(found, x, self.distance) * kept).sum(), 1.0)}
        if self.shape.levels is None:
            terms["codebook"] = ((codebook * kept).sum(), 1.0)
            terms["commitment"] = ((commitment * kept).sum(), self.commitment_weight)
        # How many codes are used is no sum over examples, so it is no metric of a step; `usage` counts it afterwards.
        return Loss(
            terms=terms, metrics={"mse": ((reconstruction_errors(found.detach(), x, "l2") * kept).sum(), kept.sum())}
        )

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """What people read off the means."""
        return add_psnr(metrics, self.value_range)


def measure_code_usage(codes: np.ndarray, num_codes: int) -> dict[str, float]:
    """Of all codes of a data set: the share that occurs, and exp of the entropy, which equal use would bring to K."""
    shares = np.bincount(codes.reshape(-1), minlength=num_codes) / codes.size
    present = shares[shares > 0]
    return {
        "codes_used": len(present) / num_codes,
        "code_perplexity": float(np.exp(-(present * np.log(present)).sum())),
    }
