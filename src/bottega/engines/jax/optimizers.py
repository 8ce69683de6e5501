"""Optimizers in JAX: optax where its update is torch's, with the state of each parameter under torch's names.

Every parameter has a state of its own, with its own step count as in torch, so that one that is unfrozen later starts at 0 and
a checkpoint of either engine opens in the other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bottega.config.optimizers import FALLBACK_OPTIMIZER, OPTIMIZER_SPECS, is_hidden_matrix
from bottega.config.parameter_groups import ParameterSetting
from bottega.config.training import Optimizer as OptimizerOptions
from bottega.engines.muon import COEFFICIENTS, EPSILON, MAX_BATCH_ELEMENTS, NUM_ITERATIONS, UPDATE_RMS
from bottega.models.jax_layers import get_platform

Array = Any
State = dict[str, Array]
"""State name, as in torch -> tensor."""


@dataclass(frozen=True)
class OptimizedParameter:
    """How one parameter is updated."""

    optimizer: str
    scale: float
    """Factor of the learning rate."""
    weight_decay: float


def assign_optimizers(
    shapes: Mapping[str, tuple[int, ...]],
    settings: Mapping[str, ParameterSetting],
    options: OptimizerOptions,
    *,
    weight_decay: float,
) -> dict[str, OptimizedParameter]:
    """Return the optimizer, rate and decay of each parameter that is trained at some step.

    Weight decay applies to matrices only, unless a group sets it: norm gains and biases should not be pulled to 0.
    """
    spec = OPTIMIZER_SPECS[options.name]
    assigned: dict[str, OptimizedParameter] = {}
    for name, shape in shapes.items():
        setting = settings[name]
        if setting.scale is None:
            continue
        has_fallback = spec.is_for_hidden_matrices_only and not is_hidden_matrix(name, len(shape))
        default_decay = weight_decay if len(shape) >= 2 else 0.0
        assigned[name] = OptimizedParameter(
            FALLBACK_OPTIMIZER if has_fallback else options.name,
            setting.scale,
            default_decay if setting.weight_decay is None else setting.weight_decay,
        )
    return assigned


def initialise_state(
    parameters: Mapping[str, Array], assigned: Mapping[str, OptimizedParameter], options: OptimizerOptions
) -> dict[str, State]:
    """Return the state of every trained parameter before its first update."""
    return {name: OPTIMIZERS[how.optimizer](options).initialise(parameters[name]) for name, how in assigned.items()}


def compute_updates(
    gradients: Mapping[str, Array],
    states: Mapping[str, State],
    parameters: Mapping[str, Array],
    assigned: Mapping[str, OptimizedParameter],
    options: OptimizerOptions,
    rate: Array,
) -> tuple[dict[str, Array], dict[str, State]]:
    """Return the parameters that have a gradient after one step, and their states."""
    new_parameters: dict[str, Array] = {}
    new_states: dict[str, State] = {}
    for optimizer_name in dict.fromkeys(assigned[name].optimizer for name in gradients):
        names = [name for name in gradients if assigned[name].optimizer == optimizer_name]
        updated, updated_states = OPTIMIZERS[optimizer_name](options).update(
            {name: gradients[name] for name in names},
            {name: states[name] for name in names},
            {name: parameters[name] for name in names},
            rates={name: rate * assigned[name].scale for name in names},
            decays={name: assigned[name].weight_decay for name in names},
        )
        new_parameters |= updated
        new_states |= updated_states
    return new_parameters, new_states


class Optimizer(ABC):
    """The update of parameters of one optimizer."""

    def __init__(self, options: OptimizerOptions) -> None:
        self.options = options

    @abstractmethod
    def initialise(self, parameter: Array) -> State:
        """Return the state of a parameter before its first update."""

    def update(
        self,
        gradients: Mapping[str, Array],
        states: Mapping[str, State],
        parameters: Mapping[str, Array],
        *,
        rates: Mapping[str, Array],
        decays: Mapping[str, float],
    ) -> tuple[dict[str, Array], dict[str, State]]:
        """Return the parameters after one step, and their states."""
        results = {
            name: self.update_one(gradient, states[name], parameters[name], rates[name], decays[name])
            for name, gradient in gradients.items()
        }
        return {name: new for name, (new, _) in results.items()}, {name: state for name, (_, state) in results.items()}

    def update_one(
        self, gradient: Array, state: State, parameter: Array, rate: Array, decay: float
    ) -> tuple[Array, State]:
        """Return one parameter after the step, and its state."""
        raise NotImplementedError


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    is_coupled = False

    def initialise(self, parameter: Array) -> State:
        zeros = jnp.zeros_like(parameter)
        return {"exp_avg": zeros, "exp_avg_sq": jnp.zeros_like(parameter), "step": jnp.zeros((), jnp.float32)}

    def update_one(
        self, gradient: Array, state: State, parameter: Array, rate: Array, decay: float
    ) -> tuple[Array, State]:
        if self.is_coupled:
            gradient, decay = gradient + decay * parameter, 0.0
        first, second = self.options.betas
        transform = optax.scale_by_adam(first, second, self.options.eps)
        old = optax.ScaleByAdamState(state["step"], state["exp_avg"], state["exp_avg_sq"])
        update, new = transform.update(gradient, old)
        assert isinstance(new, optax.ScaleByAdamState)
        return (
            parameter * (1 - rate * decay) - rate * update,
            {"exp_avg": new.mu, "exp_avg_sq": new.nu, "step": state["step"] + 1},
        )


class Adam(AdamW):
    """Adam with weight decay added to the gradient."""

    is_coupled = True


class SGD(Optimizer):
    """Gradient descent with momentum; weight decay is added to the gradient."""

    def initialise(self, parameter: Array) -> State:
        return {"momentum_buffer": jnp.zeros_like(parameter)} if self.options.momentum else {}

    def update_one(
        self, gradient: Array, state: State, parameter: Array, rate: Array, decay: float
    ) -> tuple[Array, State]:
        gradient = gradient + decay * parameter
        if not self.options.momentum:
            return parameter - rate * gradient, {}
        transform = optax.trace(self.options.momentum, nesterov=self.options.nesterov)
        update, new = transform.update(gradient, optax.TraceState(state["momentum_buffer"]))
        assert isinstance(new, optax.TraceState)
        return parameter - rate * update, {"momentum_buffer": new.trace}


class Lion(Optimizer):
    """Lion (Chen et al., 2023): the update is the sign of an interpolated momentum."""

    def initialise(self, parameter: Array) -> State:
        return {"exp_avg": jnp.zeros_like(parameter)}

    def update_one(
        self, gradient: Array, state: State, parameter: Array, rate: Array, decay: float
    ) -> tuple[Array, State]:
        transform = optax.scale_by_lion(*self.options.betas)
        update, new = transform.update(gradient, optax.ScaleByLionState(jnp.zeros((), jnp.int32), state["exp_avg"]))
        assert isinstance(new, optax.ScaleByLionState)
        return parameter * (1 - rate * decay) - rate * update, {"exp_avg": new.mu}


class Adafactor(Optimizer):
    """Adafactor (Shazeer and Stern, 2018) with the constants of torch's, which differ from those of optax's."""

    BETA2_DECAY, EPSILON_2, CLIP = -0.8, 1e-3, 1.0

    def initialise(self, parameter: Array) -> State:
        if parameter.ndim > 1:
            rows, columns = (*parameter.shape[:-1], 1), (*parameter.shape[:-2], 1, parameter.shape[-1])
            state = {"row_var": jnp.zeros(rows), "col_var": jnp.zeros(columns)}
        else:
            state = {"variance": jnp.zeros(parameter.shape)}
        return {**state, "step": jnp.zeros((), jnp.float32)}

    def update_one(
        self, gradient: Array, state: State, parameter: Array, rate: Array, decay: float
    ) -> tuple[Array, State]:
        step = state["step"] + 1
        weight = step**self.BETA2_DECAY
        epsilon = jnp.finfo(parameter.dtype).eps
        step_size = jnp.minimum(rate, 1 / jnp.sqrt(step))
        alpha = jnp.maximum(self.EPSILON_2, jnp.linalg.norm(parameter) / math.sqrt(parameter.size)) * step_size
        squared = gradient * gradient
        new_state = {"step": step}
        if gradient.ndim > 1:
            row = new_state["row_var"] = _interpolate(state["row_var"], squared.mean(-1, keepdims=True), weight)
            column = new_state["col_var"] = _interpolate(state["col_var"], squared.mean(-2, keepdims=True), weight)
            variance = row * column / jnp.maximum(row.mean(-2, keepdims=True), epsilon)
        else:
            variance = new_state["variance"] = _interpolate(state["variance"], squared, weight)
        update = gradient * jax.lax.rsqrt(jnp.maximum(variance, epsilon * epsilon))
        root_mean_square = jnp.linalg.norm(update) / math.sqrt(update.size)
        return (
            parameter * (1 - rate * decay) - alpha / jnp.maximum(1.0, root_mean_square / self.CLIP) * update,
            new_state,
        )


class Muon(Optimizer):
    """Muon (Jordan et al., 2024): the update is the momentum with its singular values set to about 1."""

    def initialise(self, parameter: Array) -> State:
        return {"momentum_buffer": jnp.zeros_like(parameter)}

    def update(
        self,
        gradients: Mapping[str, Array],
        states: Mapping[str, State],
        parameters: Mapping[str, Array],
        *,
        rates: Mapping[str, Array],
        decays: Mapping[str, float],
    ) -> tuple[dict[str, Array], dict[str, State]]:
        beta = self.options.momentum
        momenta = {
            name: _interpolate(states[name]["momentum_buffer"], gradient, 1 - beta)
            for name, gradient in gradients.items()
        }
        directions = {
            name: _interpolate(gradient, momenta[name], beta) if self.options.nesterov else momenta[name]
            for name, gradient in gradients.items()
        }
        new_parameters: dict[str, Array] = {}
        for names in _batch_by_shape(directions):
            # The matrices of one shape are iterated together: many small products would fill no device.
            updates = orthogonalise(jnp.stack([directions[name] for name in names]))
            for name, update in zip(names, updates, strict=True):
                step_size = rates[name] * UPDATE_RMS * math.sqrt(max(update.shape))
                old = parameters[name]
                new_parameters[name] = old * (1 - rates[name] * decays[name]) - step_size * update.astype(old.dtype)
        return new_parameters, {name: {"momentum_buffer": momentum} for name, momentum in momenta.items()}


def orthogonalise(matrices: Array) -> Array:
    """Return about U V^T of the matrices U S V^T, (batch, rows, columns): singular values of about 0.7 to 1.2.

    In bfloat16 on a GPU, which is enough: the iteration itself is coarser.
    """
    x = matrices if get_platform() == "cpu" else matrices.astype(jnp.bfloat16)
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT  # the Gram matrix is then the smaller one
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
    x = x / jnp.maximum(norm, EPSILON).astype(x.dtype)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def _batch_by_shape(matrices: Mapping[str, Array]) -> list[list[str]]:
    """Return the names of the matrices of each shape, at most MAX_BATCH_ELEMENTS of their elements together."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, matrix in matrices.items():
        by_shape.setdefault(matrix.shape, []).append(name)
    batches: list[list[str]] = []
    for shape, names in by_shape.items():
        size = max(1, MAX_BATCH_ELEMENTS // math.prod(shape))
        batches += [names[start : start + size] for start in range(0, len(names), size)]
    return batches


def _interpolate(start: Array, end: Array, weight: Array | float) -> Array:
    return start + weight * (end - start)


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": SGD,
    "lion": Lion,
    "adafactor": Adafactor,
    "muon": Muon,
}
