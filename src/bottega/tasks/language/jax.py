"""The loss of causal language modelling in JAX: the twin of `torch.py`, for decoders without experts."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from bottega.core.types import Batch, Loss, Models, Sums
from bottega.models.losses import IGNORE_INDEX
from bottega.tasks.language.task import Language


def compute_loss(task: Language, models: Models, batch: Batch) -> Loss:
    """Return the summed negative log likelihood of the targets."""
    inputs, documents = _split_inputs(batch)
    targets = batch["input_ids"][:, 1:]
    if "attention_mask" in batch:
        targets = jnp.where(batch["attention_mask"][:, 1:] > 0, targets, IGNORE_INDEX)
    if "weight" in batch:
        targets = jnp.where((batch["weight"] > 0)[:, None], targets, IGNORE_INDEX)
    total = models["model"](inputs, targets, documents=documents)
    metrics: Sums = {}
    if "bytes" in batch:
        num_bytes = batch["bytes"].astype(jnp.float32)
        if "weight" in batch:
            num_bytes = num_bytes * (batch["weight"] > 0)
        metrics["bits_per_byte"] = (jax.lax.stop_gradient(total) / math.log(2.0), num_bytes.sum())
    return Loss(terms={"loss": (total, 1.0)}, metrics=metrics)


def compute_logits(models: Models, batch: Batch) -> Any:
    """Return all logits, (batch, length, vocabulary); for small batches only."""
    inputs, documents = _split_inputs(batch)
    return models["model"](inputs, documents=documents)


def _split_inputs(batch: Batch) -> tuple[Any, Any]:
    documents = batch["documents"][:, :-1] if "documents" in batch else None
    return batch["input_ids"][:, :-1], documents
