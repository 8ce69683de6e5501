"""A task's model in torch and in JAX with the same weights, and the losses and gradients of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Loss
from bottega.models import jax_build
from bottega.models.build import build_models
from bottega.models.jax_layers import Module, bind, forward_context
from bottega.models.jax_noise import JaxNoise

STEP = 3
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0}
"""Options of `jax.jit` for functions that run once: they take half as long."""


class Twins(NamedTuple):
    """A task and its model in both frameworks."""

    task: Task
    torch: Any
    jax: Module


class Outputs(NamedTuple):
    """A loss and its gradients as host arrays, by name."""

    terms: dict[str, np.ndarray]
    metrics: dict[str, tuple[np.ndarray, np.ndarray]]
    rows: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]


def build_twins(task: Task, *, seed: int = 0) -> Twins:
    """Build both models with their own initial weights."""
    return Twins(task, build_models(task, seed)["model"], jax_build.build_model(task.specs()["model"], seed))


def build_perturbed_twins(task: Task) -> Twins:
    """Build both models with weights that no initial value has, such as biases that are not 0."""
    twins = build_twins(task)
    rng = np.random.default_rng(0)
    values = {
        name: value + 0.1 * rng.standard_normal(value.shape, dtype=np.float32)
        for name, value in twins.jax.state_dict().items()
    }
    jax_build.set_parameters(twins.jax, values)
    twins.torch.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})
    return twins


def compute_in_torch(twins: Twins, batch: Mapping[str, np.ndarray], *, is_training: bool) -> Outputs:
    """Return the loss in torch, in training with its gradients."""
    twins.torch.train(is_training)
    twins.torch.zero_grad()
    positions = torch.arange(len(next(iter(batch.values()))))
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    out = twins.task.loss({"model": twins.torch}, tensors, Noise(0, STEP, positions, torch))
    if not is_training:
        return _to_host(out, {})
    sum(total * weight for total, weight in out.terms.values()).backward()
    return _to_host(out, {name: parameter.grad for name, parameter in twins.torch.named_parameters()})


def compute_in_jax(
    twins: Twins, batch: Mapping[str, np.ndarray], *, is_training: bool, checkpoints_blocks: bool = False
) -> Outputs:
    """Return the loss in JAX, in training with its gradients."""
    positions = np.arange(len(next(iter(batch.values()))))
    rng = JaxNoise.of_step(0, STEP, positions, twins.task.noise_names)

    def compute(parameters: dict[str, Any]) -> tuple[Any, Loss]:
        key = jax.random.key(0) if is_training else None
        with forward_context(dropout_key=key, checkpoints_blocks=checkpoints_blocks):
            out = twins.task.loss({"model": bind(twins.jax, parameters)}, arrays, rng)
        return sum(total * weight for total, weight in out.terms.values()), out

    arrays = {name: jax.numpy.asarray(array) for name, array in batch.items()}
    parameters = twins.jax.named_parameters()
    if not is_training:
        return _to_host(jax.jit(compute, compiler_options=QUICK_TO_COMPILE)(parameters)[1], {})
    differentiate = jax.jit(jax.grad(compute, has_aux=True), compiler_options=QUICK_TO_COMPILE)
    gradients, out = differentiate(parameters)
    return _to_host(out, gradients)


def _to_host(out: Loss, gradients: Mapping[str, Any]) -> Outputs:
    return Outputs(
        {name: _to_array(total) for name, (total, _) in out.terms.items()},
        {name: (_to_array(value), _to_array(count)) for name, (value, count) in out.metrics.items()},
        {name: _to_array(rows) for name, rows in out.rows.items()},
        {name: _to_array(gradient) for name, gradient in gradients.items()},
    )


def _to_array(value: Any) -> np.ndarray:
    return value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def assert_close(actual: np.ndarray, expected: np.ndarray, *, rtol: float, what: str = "") -> None:
    """Assert that the largest difference is at most `rtol` of the largest value."""
    assert actual.shape == expected.shape, what
    difference, scale = np.abs(actual - expected).max(initial=0), np.abs(expected).max(initial=0)
    assert difference <= rtol * scale, f"{what}: {difference} of {scale}"


def assert_outputs_close(actual: Outputs, expected: Outputs) -> None:
    """Assert that losses, metrics and rows agree to 1e-5, and gradients to 1e-4."""
    assert list(actual.terms) == list(expected.terms)
    assert actual.metrics.keys() == expected.metrics.keys()
    assert actual.rows.keys() == expected.rows.keys()
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, total in actual.terms.items():
        assert_close(total, expected.terms[name], rtol=1e-5, what=name)
    for name, (value, count) in actual.metrics.items():
        assert_close(value, expected.metrics[name][0], rtol=1e-5, what=name)
        assert_close(count, expected.metrics[name][1], rtol=1e-5, what=name)
    for name, rows in actual.rows.items():
        assert_close(rows, expected.rows[name], rtol=1e-5, what=name)
    for name, gradient in actual.gradients.items():
        assert_close(gradient, expected.gradients[name], rtol=1e-4, what=name)
