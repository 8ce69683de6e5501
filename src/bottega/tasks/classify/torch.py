"""The loss and the predictions of a classifier in torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bottega.core.noise import Noise
from bottega.core.types import Batch, Loss, Sums
from bottega.models.spiking.config import SpikingNetShape
from bottega.models.spiking.units import firing_rate_penalties, sum_activity, unit_activity
from bottega.models.text_classifier.config import NgramShape
from bottega.tasks.classify.losses.base import Operations
from bottega.tasks.classify.task import DRAWS_MULTIPLE, Classification

OPERATIONS = Operations(
    softmax=lambda logits: logits.softmax(dim=1),
    sigmoid=torch.sigmoid,
    where=torch.where,
    select_class=lambda values, labels: values.gather(1, labels[:, None])[:, 0],
    cross_entropy=lambda logits, labels, label_smoothing: F.cross_entropy(
        logits, labels, reduction="none", label_smoothing=label_smoothing
    ),
    binary_cross_entropy=lambda logits, targets: F.binary_cross_entropy_with_logits(logits, targets, reduction="none"),
)


def compute_loss(task: Classification, model: Any, batch: Batch, rng: Noise) -> Loss:
    """Return the summed loss, the metrics, and the probabilities and labels as rows."""
    logits, spikes = _forward(task, model, batch, rng if model.training else None)
    logits = logits.float()
    labels = batch["labels"].float() if task.multi_label else batch["label"].long()
    compute_losses = _compute_multi_label_loss if task.multi_label else _compute_single_label_loss
    losses = compute_losses(task, logits, labels)
    is_counted = batch["weight"] > 0 if "weight" in batch else torch.ones_like(losses, dtype=torch.bool)
    # Select instead of multiplying: padding rows may have any value, and 0 times infinity is not a number.
    total = torch.where(is_counted, losses, 0.0).sum()
    outputs = logits.detach()
    if task.multi_label:
        is_correct = (outputs >= 0) == (labels > 0)
        correct = {"exact_match": is_correct.all(1), "label_accuracy": is_correct.float().mean(1)}
        rows = {"probability": outputs.sigmoid(), "labels": labels}
    else:
        correct = {"accuracy": outputs.argmax(dim=1) == labels}
        rows = {"probability": outputs.softmax(dim=1), "label": labels}
    if task.has_modified_loss and not model.training:
        metrics = _compute_evaluation_metrics(task, outputs, labels, is_counted, correct, total)
    else:
        metrics = _sum_counted(correct, is_counted)
    out = Loss(terms={"loss": (total, 1.0)}, metrics=metrics, rows=rows)
    return _add_firing_rate(task, out, spikes, is_counted) if spikes else out


def compute_logits(task: Classification, model: Any, batch: Batch) -> Tensor:
    """Return logits, (batch, classes), of a batch on the device of the model."""
    return _forward(task, model, batch, None)[0]


@torch.no_grad()
def predict_probabilities(task: Classification, model: Any, batch: Batch, *, device: Any) -> np.ndarray:
    """Return class probabilities, float32 (batch, classes), of a host batch."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in batch.items()}
    logits = compute_logits(task, model, tensors).float()
    return (logits.sigmoid() if task.multi_label else logits.softmax(dim=1)).cpu().numpy()


@torch.no_grad()
def predict_with_features(model: Any, samples: np.ndarray, *, device: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the class probabilities, (batch, classes), and the features, (batch, features), of samples of a medium."""
    was_training = model.training
    model.eval()
    try:
        features = model.features(torch.from_numpy(samples).to(device))
        probabilities = model.head(features).float().softmax(dim=1)
    finally:
        model.train(was_training)
    return probabilities.cpu().numpy(), features.float().cpu().numpy()


def _forward(task: Classification, model: Any, batch: Batch, rng: Noise | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the logits, and for a spiking network the spikes of each layer.

    With `rng`, in training, words are dropped and pixels become spikes at random; without, the result is deterministic.
    """
    if isinstance(task.shape, SpikingNetShape):
        inputs: dict[str, Tensor] = {}
        if rng is not None and task.shape.coding == "rate":
            inputs["draws"] = rng.uniform("rate_code", (task.shape.neuron.time_steps, task.shape.num_inputs))
        logits, spikes = model(batch[task.key], **inputs)
        return logits, spikes
    if task.key != "text":
        return model(batch[task.key]), ()
    ngrams = (batch["ngram_ids"].long(), batch["ngram_weights"]) if "ngram_ids" in batch else ()
    if isinstance(task.shape, NgramShape):
        return model(*ngrams), ()
    ids, mask = batch["input_ids"].long(), batch["attention_mask"] > 0
    if task.word_dropout and rng is not None:
        assert task.unknown is not None
        length = ids.shape[1]
        draws = rng.uniform("word_dropout", (-(-length // DRAWS_MULTIPLE) * DRAWS_MULTIPLE,))[:, :length]
        ids = torch.where((draws < task.word_dropout) & mask, task.unknown, ids)
    return model(ids, mask, *ngrams), ()


def _compute_single_label_loss(task: Classification, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each example times the weight of its class, (batch,)."""
    losses: Tensor = task.build_loss().per_example(logits, labels, OPERATIONS)
    return losses if task.class_weights is None else losses * _copy_weights(task.class_weights, logits.device)[labels]


def _compute_multi_label_loss(task: Classification, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the weighted mean of each example's losses over the classes, (batch,)."""
    losses: Tensor = task.build_loss().per_label(logits, labels, OPERATIONS)
    if task.class_weights is None:
        return losses.mean(1)
    weights = _copy_weights(task.class_weights, logits.device)
    return (losses * weights).sum(1) / weights.sum()


def _compute_evaluation_metrics(
    task: Classification,
    logits: Tensor,
    labels: Tensor,
    is_counted: Tensor,
    correct: Mapping[str, Tensor],
    total: Tensor,
) -> Sums:
    """Return the metrics of an evaluation if the loss is modified.

    `loss` is plain cross-entropy in nats, so that runs can be compared; the minimised value is `objective`. (A metric
    takes precedence over the loss term of the same name.)
    """
    if task.multi_label:
        cross_entropy = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)
    else:
        cross_entropy = F.cross_entropy(logits, labels, reduction="none")
    weights = is_counted.float()
    if task.class_weights is not None and not task.multi_label:
        weights = weights * _copy_weights(task.class_weights, logits.device)[labels]
    return {
        **_sum_counted({**correct, "loss": cross_entropy}, is_counted),
        "objective": (total.detach(), weights.sum()),
    }


def _add_firing_rate(task: Classification, out: Loss, spikes: tuple[Tensor, ...], is_counted: Tensor) -> Loss:
    """Add the firing rate, its loss term, and for each unit whether it is dead or saturated."""
    assert isinstance(task.shape, SpikingNetShape)
    spike_trains = torch.cat(spikes, dim=2)
    terms, metrics = (
        dict(out.terms),
        {**out.metrics, "firing_rate": sum_activity(spike_trains, is_counted)["firing_rate"]},
    )
    if task.has_firing_rate_target:
        assert task.firing_rate is not None
        penalties = torch.stack([firing_rate_penalties(layer, task.firing_rate) for layer in spikes]).mean(0)
        terms["firing"] = (torch.where(is_counted, penalties, 0.0).sum(), task.firing_rate_weight)
    return Loss(terms, metrics, {**out.rows, "units": unit_activity(spike_trains, task.shape.neuron.highest_rate)})


def _sum_counted(values: Mapping[str, Tensor], is_counted: Tensor) -> Sums:
    count = is_counted.float().sum()
    return {name: (torch.where(is_counted, value, 0).float().sum(), count) for name, value in values.items()}


@lru_cache(maxsize=16)
def _copy_weights(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Class weights on `device`, cached because copying them makes the host wait."""
    return torch.tensor(values, device=device)
