"""The loss of distillation in JAX, from the outputs of student and teacher: the twin of `torch.py`, without hidden states.

B batch   T tokens   K classes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp

from bottega.core.errors import UsageError
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Batch, Loss, Models
from bottega.models.jax_build import build_model, has_jax_form
from bottega.models.jax_layers import Module, forward_context, get_compute_dtype, is_training
from bottega.models.losses import IGNORE_INDEX
from bottega.techniques.distill.task import TEACHER, Distillation
from bottega.techniques.tensor_hashes import combine_hashes, hash_tensor

Array = Any


def build_teacher(task: Task) -> Module:
    """Return the model of a task, with its pretrained weights."""
    spec = task.specs()["model"]
    if not has_jax_form(spec):
        raise UsageError(f"{spec.pretrained} is a model without a JAX form; give another teacher, or use engine=torch")
    return build_model(spec, 0)


def hash_weights(model: Module) -> str:
    """Return one SHA-256 over all tensors of a model, the same as in torch."""
    tensors = sorted(model.state_dict().items())
    return combine_hashes({name: hash_tensor(f"torch.{array.dtype}", array.shape, array) for name, array in tensors})


def compute_loss(task: Distillation, models: Models, batch: Batch, rng: Noise) -> Loss:
    """Return the loss of the data and of the teacher, weighted by alpha."""
    if is_training() and not task.alpha:
        # With weight 0 the teacher is only evaluated; training steps do not call it.
        return task.inner.loss(models, batch, rng)
    recorder = CallRecorder(models["model"], computes_token_loss=task.form == "tokens")
    output = task.inner.loss({**models, "model": recorder}, batch, rng)
    call = recorder.single_call
    with forward_context(dtype=get_compute_dtype()):  # without dropout
        teacher_output = jax.lax.stop_gradient(models[TEACHER](*call.args, **call.kwargs))
    example_mask = batch["weight"] > 0 if "weight" in batch else None
    distances = _compute_distances(task, call.output, teacher_output)
    total, count = _masked_sum(distances, call.target_mask if task.form == "tokens" else example_mask)
    terms = {name: (value, weight * (1 - task.alpha)) for name, (value, weight) in output.terms.items()}
    terms["distill"] = (total, task.alpha)
    return output._replace(terms=terms, metrics={**output.metrics, "distill": (jax.lax.stop_gradient(total), count)})


def _compute_distances(task: Distillation, student: Array, teacher: Array) -> Array:
    """Return the distance of each example `(B,)` or token `(B, T)`."""
    if task.form == "values":
        difference = student.astype(jnp.float32) - teacher.astype(jnp.float32)
        return jnp.square(difference).reshape(len(difference), -1).mean(axis=1)
    if task.form == "labels":
        return softened_binary_kl(student, teacher, task.temperature)
    return softened_kl(student, teacher, task.temperature)


def softened_kl(student: Array, teacher: Array, temperature: float) -> Array:
    """Return KL(teacher || student) of logits `(..., K)`, both divided by the temperature, times the temperature squared."""
    ours, theirs = (jax.nn.log_softmax(logits.astype(jnp.float32) / temperature) for logits in (student, teacher))
    return (jnp.exp(theirs) * (theirs - ours)).sum(axis=-1) * temperature**2


def softened_binary_kl(student: Array, teacher: Array, temperature: float) -> Array:
    """Return the softened KL of independent binary logits `(B, K)`: the mean over labels, `(B,)`."""
    ours, theirs = student.astype(jnp.float32) / temperature, teacher.astype(jnp.float32) / temperature
    positive = jax.nn.sigmoid(theirs) * (jax.nn.log_sigmoid(theirs) - jax.nn.log_sigmoid(ours))
    negative = jax.nn.sigmoid(-theirs) * (jax.nn.log_sigmoid(-theirs) - jax.nn.log_sigmoid(-ours))
    return (positive + negative).mean(axis=-1) * temperature**2


def _masked_sum(values: Array, mask: Array | None) -> tuple[Array, Any]:
    """Return sum and count over the mask. Values are selected rather than multiplied, since padding may be NaN."""
    if mask is None:
        return values.sum(), float(values.size)
    return jnp.where(mask, values, 0.0).sum(), mask.astype(jnp.float32).sum()


# The call of the student


@dataclass(frozen=True)
class ModelCall:
    """Arguments and output of one call of a model, recorded while the step is traced."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Array
    target_mask: Array | None = None
    """Bool `(B, T)`: the tokens that are predicted."""


@final
class CallRecorder:
    """Proxy of a model that records its calls; every other attribute is the model's own.

    With `computes_token_loss`, it is called like the transformer, with inputs and targets, and returns the summed negative
    log likelihood: it calls the model for logits and computes the sum from them.
    """

    def __init__(self, model: Any, *, computes_token_loss: bool) -> None:
        self.model, self.computes_token_loss = model, computes_token_loss
        self.calls: list[ModelCall] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Array:
        if not self.computes_token_loss:
            output = self.model(*args, **kwargs)
            self.calls.append(ModelCall(args, kwargs, output))
            return output
        inputs, targets = args
        logits = self.model(inputs, **kwargs)
        self.calls.append(ModelCall((inputs,), kwargs, logits, targets != IGNORE_INDEX))
        return token_cross_entropy(logits, targets)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def single_call(self) -> ModelCall:
        """The recorded call; there must be exactly one."""
        assert len(self.calls) == 1, f"the model was called {len(self.calls)} times"
        return self.calls[0]


def token_cross_entropy(logits: Array, targets: Array) -> Array:
    """Return the summed negative log likelihood of targets `(B, T)` under logits `(B, T, V)`, in float32."""
    is_counted = targets != IGNORE_INDEX
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    own = jnp.take_along_axis(log_probabilities, jnp.where(is_counted, targets, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(is_counted, own, 0.0).sum()
