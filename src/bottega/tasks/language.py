"""Language modelling: predict the next token of a text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Batch, Loss, Models
from bottega.models.initial import initialise
from bottega.models.pretrained import fetch_folder, load_weights
from bottega.models.token_loss import IGNORED
from bottega.models.transformer import Transformer
from bottega.schema.transformer import TransformerShape


class Language(Task):
    """A batch holds `input_ids` [b, T+1]: all but the last are read, all but the first are predicted.

    Optional: `attention_mask` [b, T+1], where 0 fills up a row at its end: nothing real sees it, because attention is
    causal, and it is never predicted; `weight` [b], where 0 marks a padding row that counts nowhere; `documents`
    [b, T+1], ids between which nothing is seen; `bytes` [b], the length of the text that the row's targets stand for.
    """

    shape: TransformerShape
    pretrained: str | None = None
    """A local folder or a hub name whose weights the training starts from."""

    def build(self, seed: int) -> dict[str, Any]:
        # Without memory first: torch's own initial values would be drawn only to be overwritten.
        with torch.device("meta"):
            model = Transformer(self.shape)
        model.to_empty(device="cpu")
        if self.pretrained is None:
            initialise(model, seed, residual_layers=self.shape.num_layers)
        else:
            load_weights(model, fetch_folder(self.pretrained))
        return {"model": model}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        mask = batch["attention_mask"] if "attention_mask" in batch else np.ones(np.shape(batch["input_ids"]))
        predicted = np.asarray(mask)[:, 1:] > 0
        if "weight" in batch:
            predicted = predicted & (np.asarray(batch["weight"]) > 0)[:, None]
        return {"loss": float(predicted.sum())}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        inputs, documents = _inputs(batch)
        targets = batch["input_ids"][:, 1:]
        if "attention_mask" in batch:
            targets = targets.masked_fill(batch["attention_mask"][:, 1:] <= 0, IGNORED)
        if "weight" in batch:
            targets = targets.masked_fill((batch["weight"] <= 0)[:, None], IGNORED)
        total = models["model"](inputs, targets, documents=documents)
        if "bytes" not in batch:
            return Loss(terms={"loss": (total, 1.0)})
        size = batch["bytes"].float()
        if "weight" in batch:
            size = size * (batch["weight"] > 0)
        return Loss(
            terms={"loss": (total, 1.0)}, metrics={"bits_per_byte": (total.detach() / math.log(2.0), size.sum())}
        )

    def predict(self, models: Models, batch: Batch) -> Tensor:
        """All logits [b, T, V]: for small batches."""
        inputs, documents = _inputs(batch)
        return models["model"](inputs, documents=documents)

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """What people read off the means: the perplexity of a loss in nats."""
        if "loss" not in metrics:
            return dict(metrics)
        # Beyond e ** 700 a float is infinite, and so is the surprise.
        return {**metrics, "perplexity": math.exp(metrics["loss"]) if metrics["loss"] < 700 else math.inf}


def _inputs(batch: Batch) -> tuple[Tensor, Tensor | None]:
    documents = batch["documents"][:, :-1] if "documents" in batch else None
    return batch["input_ids"][:, :-1], documents
