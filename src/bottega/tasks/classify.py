"""Classification: which class a picture, a sound or a video is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field

from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Batch, Loss, Models
from bottega.models.convnet import ConvNet
from bottega.models.initial_conv import initialise_convolutional
from bottega.models.pretrained import load_weights
from bottega.schema.convnet import ConvNetShape


class Classification(Task):
    """A batch holds the samples under `key`, [b, *grid, C], and `label` [b], the number of the class.

    Optional: `weight` [b], where 0 marks a padding row that counts nowhere.
    """

    key: Literal["image", "mel", "video"]
    shape: ConvNetShape
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    pretrained: str | None = None
    """A local folder whose weights the training starts from."""

    def build(self, seed: int) -> dict[str, Any]:
        # Without memory first: torch's own initial values would be drawn only to be overwritten.
        with torch.device("meta"):
            model = ConvNet(self.shape)
        model.to_empty(device="cpu")
        if self.pretrained is None:
            initialise_convolutional(model, seed, residual_layers=len(model.blocks))
        else:
            load_weights(model, self.pretrained)
        return {"model": model}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        if "weight" in batch:
            return {"loss": float((np.asarray(batch["weight"]) > 0).sum())}
        return {"loss": float(len(batch["label"]))}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        labels = batch["label"].long()
        logits = models["model"](batch[self.key]).float()
        surprise = F.cross_entropy(logits, labels, reduction="none", label_smoothing=self.label_smoothing)
        is_right = logits.argmax(dim=1) == labels
        counted = batch["weight"] > 0 if "weight" in batch else torch.ones_like(is_right)
        # Selected rather than multiplied: what fills up a batch may be of any value, and 0 times infinity is none.
        total = torch.where(counted, surprise, 0.0).sum()
        right = (is_right & counted).float().sum()
        return Loss(terms={"loss": (total, 1.0)}, metrics={"accuracy": (right, counted.float().sum())})
