"""The loss and the predictions of a classifier in JAX: the twin of `torch.py`, without spikes and n-grams."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bottega.core.noise import Noise
from bottega.core.types import Batch, Loss, Sums
from bottega.models.jax_layers import forward_context, get_compute_dtype, is_training
from bottega.tasks.classify.losses.base import Operations
from bottega.tasks.classify.task import DRAWS_MULTIPLE, Classification

Array = Any


def compute_cross_entropy(logits: Array, labels: Array, label_smoothing: float = 0.0) -> Array:
    """Return the cross-entropy of each example, (batch,), from logits (batch, classes) and class numbers (batch,)."""
    log_probabilities = jax.nn.log_softmax(logits, axis=1)
    losses = -_select_class(log_probabilities, labels)
    if not label_smoothing:
        return losses
    return (1 - label_smoothing) * losses - label_smoothing * log_probabilities.mean(axis=1)


def compute_binary_cross_entropy(logits: Array, targets: Array) -> Array:
    """Return the binary cross-entropy of each label, (batch, classes), from logits and target probabilities of that shape."""
    return (1 - targets) * logits + jax.nn.softplus(-logits)


def _select_class(values: Array, labels: Array) -> Array:
    return jnp.take_along_axis(values, labels[:, None], axis=1)[:, 0]


OPERATIONS = Operations(
    softmax=partial(jax.nn.softmax, axis=1),
    sigmoid=jax.nn.sigmoid,
    where=jnp.where,
    select_class=_select_class,
    cross_entropy=compute_cross_entropy,
    binary_cross_entropy=compute_binary_cross_entropy,
)


def compute_loss(task: Classification, model: Any, batch: Batch, rng: Noise) -> Loss:
    """Return the summed loss, the metrics, and the probabilities and labels as rows."""
    logits = compute_logits(task, model, batch, rng if is_training() else None).astype(jnp.float32)
    labels = batch["labels"].astype(jnp.float32) if task.multi_label else batch["label"]
    losses = _compute_losses(task, logits, labels)
    is_counted = batch["weight"] > 0 if "weight" in batch else jnp.ones(losses.shape, bool)
    # Select instead of multiplying: padding rows may have any value, and 0 times infinity is not a number.
    total = jnp.where(is_counted, losses, 0.0).sum()
    outputs = jax.lax.stop_gradient(logits)
    if task.multi_label:
        is_correct = (outputs >= 0) == (labels > 0)
        correct = {"exact_match": is_correct.all(axis=1), "label_accuracy": is_correct.mean(axis=1)}
        rows = {"probability": jax.nn.sigmoid(outputs), "labels": labels}
    else:
        correct = {"accuracy": outputs.argmax(axis=1) == labels}
        rows = {"probability": jax.nn.softmax(outputs, axis=1), "label": labels}
    if task.has_modified_loss and not is_training():
        metrics = _compute_evaluation_metrics(task, outputs, labels, is_counted, correct, total)
    else:
        metrics = _sum_counted(correct, is_counted)
    return Loss(terms={"loss": (total, 1.0)}, metrics=metrics, rows=rows)


def compute_logits(task: Classification, model: Any, batch: Batch, rng: Noise | None = None) -> Array:
    """Return logits, (batch, classes). With `rng`, in training, words are dropped; without, the result is deterministic."""
    if task.key != "text":
        return model(batch[task.key])
    ids, mask = batch["input_ids"], batch["attention_mask"] > 0
    if task.word_dropout and rng is not None:
        assert task.unknown is not None
        length = ids.shape[1]
        draws = rng.uniform("word_dropout", (-(-length // DRAWS_MULTIPLE) * DRAWS_MULTIPLE,))[:, :length]
        ids = jnp.where((draws < task.word_dropout) & mask, task.unknown, ids)
    return model(ids, mask)


def predict_probabilities(task: Classification, model: Any, batch: Batch, *, device: Any) -> np.ndarray:
    """Return class probabilities, float32 (batch, classes), of a host batch, on the device of the model.

    Texts and batches are padded to one of few sizes, each of which is compiled once.
    """
    count = len(next(iter(batch.values())))
    padded = {name: _pad_rows(array) for name, array in task.bucket(batch).items()}
    return np.asarray(_jit_probabilities(task, model, padded, get_compute_dtype()))[:count]


def predict_with_features(model: Any, samples: np.ndarray, *, device: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the class probabilities, (batch, classes), and the features, (batch, features), of samples of a medium."""
    probabilities, features = _jit_features(model, _pad_rows(samples), get_compute_dtype())
    return np.asarray(probabilities)[: len(samples)], np.asarray(features)[: len(samples)]


def _pad_rows(array: np.ndarray) -> np.ndarray:
    """Pad the number of rows to a power of two."""
    num_padding = (1 << max(0, len(array) - 1).bit_length()) - len(array)
    return np.pad(array, ((0, num_padding), *((0, 0),) * (array.ndim - 1)))


def _compute_probabilities(task: Classification, model: Any, batch: Batch, dtype: Any) -> Array:
    with forward_context(dtype=dtype):
        logits = compute_logits(task, model, batch).astype(jnp.float32)
    return jax.nn.sigmoid(logits) if task.multi_label else jax.nn.softmax(logits, axis=1)


def _compute_features(model: Any, samples: Array, dtype: Any) -> tuple[Array, Array]:
    with forward_context(dtype=dtype):
        features = model.features(samples)
        logits = model.head(features).astype(jnp.float32)
    return jax.nn.softmax(logits, axis=1), features.astype(jnp.float32)


# The dtype is an argument because jit does not see the context of a forward.
_jit_probabilities: Any = nnx.jit(_compute_probabilities, static_argnums=(0, 3))
_jit_features: Any = nnx.jit(_compute_features, static_argnums=2)


def _compute_losses(task: Classification, logits: Array, labels: Array) -> Array:
    """Return the loss of each example, (batch,), with the weights of the classes."""
    weights = None if task.class_weights is None else jnp.asarray(task.class_weights, jnp.float32)
    loss = task.build_loss()
    if task.multi_label:
        losses = loss.per_label(logits, labels, OPERATIONS)
        return losses.mean(axis=1) if weights is None else (losses * weights).sum(axis=1) / weights.sum()
    losses = loss.per_example(logits, labels, OPERATIONS)
    return losses if weights is None else losses * weights[labels]


def _compute_evaluation_metrics(
    task: Classification, logits: Array, labels: Array, is_counted: Array, correct: Mapping[str, Array], total: Array
) -> Sums:
    """Return the metrics of an evaluation if the loss is modified: `loss` is plain cross-entropy, `objective` the minimised value."""
    weights = is_counted.astype(jnp.float32)
    if task.multi_label:
        cross_entropy = compute_binary_cross_entropy(logits, labels).mean(axis=1)
    else:
        cross_entropy = compute_cross_entropy(logits, labels)
        if task.class_weights is not None:
            weights = weights * jnp.asarray(task.class_weights, jnp.float32)[labels]
    metrics = _sum_counted({**correct, "loss": cross_entropy}, is_counted)
    return {**metrics, "objective": (jax.lax.stop_gradient(total), weights.sum())}


def _sum_counted(values: Mapping[str, Array], is_counted: Array) -> Sums:
    count = is_counted.astype(jnp.float32).sum()
    return {name: (jnp.where(is_counted, value, 0).astype(jnp.float32).sum(), count) for name, value in values.items()}
