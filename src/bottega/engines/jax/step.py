"""The training step: gradients of the global mean over micro-batches, and the update, as one jitted function.

Everything that changes from step to step is an argument, so that a step is compiled once: the learning rate, the counts, and the
keys of the noise and of dropout, which are hashes that the host computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bottega.config.training import Training
from bottega.core.task import Task
from bottega.core.types import Loss
from bottega.engines.jax.histograms import DeviceHistogram, compute_histograms
from bottega.engines.jax.mesh import DeviceMesh
from bottega.engines.jax.module_statistics import ModuleStatistics
from bottega.engines.jax.optimizers import OptimizedParameter, State, compute_updates
from bottega.models.jax_layers import Module, bind, forward_context
from bottega.models.jax_noise import JaxNoise

Array = Any
Parameters = Mapping[str, Array]


class TrainState(NamedTuple):
    """Everything that a step changes, on the device."""

    parameters: dict[str, Array]
    optimizer: dict[str, State]
    average: dict[str, Array]
    """The moving average of the trained parameters; empty without `training.ema`."""
    task_state: dict[str, Array]
    nan_after_bad_step: Array
    """0, or NaN after a step that was not finite: later updates are then skipped until the trainer has handled it."""
    bad_steps: Array


class MicroBatches(NamedTuple):
    """Micro-batches of one size, each array with a first axis that counts them."""

    batch: dict[str, Any]
    positions: Array
    """Positions in the global batch, (micro-batches, examples)."""
    dropout_keys: Array
    """Key words of each micro-batch, (micro-batches, 2)."""


class StepInputs(NamedTuple):
    """The arguments of a step."""

    groups: tuple[MicroBatches, ...]
    """All micro-batches; the last one may be smaller and is then a group of its own."""
    counts: dict[str, Array]
    """Of the global batch."""
    noise_keys: dict[str, Array]
    rate: Array
    is_skipped: Array
    """Whether the update is left out whatever the gradients are."""
    average_decay: Array


class StepOutputs(NamedTuple):
    """What a step reports, on the device."""

    loss: Array
    gradient_norm: Array
    bad_steps: Array
    means: dict[str, Array]
    """Means of the loss terms, if there are several."""
    sums: dict[str, tuple[Array, Array]]
    """Metrics as sums and counts."""
    penalty: Array | None
    statistics: dict[str, Array]
    histograms: dict[str, DeviceHistogram]


@dataclass(frozen=True)
class StepBuilder:
    """Builds the jitted functions of one task; each set of trained parameters has its own."""

    task: Task
    model: Module
    frozen_models: Mapping[str, Module]
    """Abstract models, whose parameters are arguments of the functions."""
    training: Training
    assigned: Mapping[str, OptimizedParameter]
    dtype: Any
    seed: int
    statistics: ModuleStatistics
    mesh: DeviceMesh

    def build_train_step(
        self, trained_names: Sequence[str], *, has_histograms: bool
    ) -> Callable[[TrainState, Mapping[str, Parameters], StepInputs], tuple[TrainState, StepOutputs]]:
        """Return the jitted step that updates `trained_names`; it reuses the memory of the state."""

        def train_step(
            state: TrainState, frozen: Mapping[str, Parameters], inputs: StepInputs
        ) -> tuple[TrainState, StepOutputs]:
            gradients, loss, means, sums = self._compute_gradients(state.parameters, frozen, inputs, trained_names)
            penalty, gradients = self._add_penalty(state, gradients)
            norm = jnp.sqrt(sum((jnp.sum(jnp.square(g)) for g in gradients.values()), jnp.zeros(())))
            skip, new_nan, bad_steps = self._guard(state, norm + loss, inputs.is_skipped)
            histograms = compute_histograms(state.parameters, gradients) if has_histograms else {}
            new_state = self._update(state, gradients, norm, inputs, skip)
            statistics = self.statistics.compute(gradients, state.parameters, new_state.parameters)
            new_state = new_state._replace(nan_after_bad_step=new_nan, bad_steps=bad_steps)
            return new_state, StepOutputs(loss, norm, bad_steps, means, sums, penalty, statistics, histograms)

        return jax.jit(train_step, donate_argnums=0)

    def compute_loss(
        self,
        parameters: Parameters,
        frozen: Mapping[str, Parameters],
        batch: Mapping[str, Any],
        rng: JaxNoise,
        *,
        dropout_key: Array | None,
        task: Task | None = None,
        model: Module | None = None,
    ) -> Loss:
        """Return the loss of the task for one micro-batch; without a dropout key, of an evaluation.

        `model` is the trained model with these parameters, if it is bound already.
        """
        models = {name: bind(model, frozen[name]) for name, model in self.frozen_models.items()}
        models["model"] = bind(self.model, parameters) if model is None else model
        with forward_context(
            dtype=self.dtype,
            dropout_key=dropout_key,
            checkpoints_blocks=self.training.gradient_checkpointing,
            place=self.mesh.place_examples if self.mesh.num_devices > 1 else None,
        ):
            return (task or self.task).loss(models, batch, rng)

    def _compute_gradients(
        self,
        parameters: Parameters,
        frozen: Mapping[str, Parameters],
        inputs: StepInputs,
        trained_names: Sequence[str],
    ) -> tuple[dict[str, Array], Array, dict[str, Array], dict[str, tuple[Array, Array]]]:
        """Return the gradient and value of the global mean, and the means and sums to report."""
        trained = {name: parameters[name] for name in trained_names}
        counts = {name: jnp.sum(count) for name, count in inputs.counts.items()}  # over processes

        def compute(trained: Parameters, micro_batch: MicroBatches) -> tuple[Array, Any]:
            rng = JaxNoise(self.seed, 0, micro_batch.positions, keys=inputs.noise_keys)
            key = jax.random.wrap_key_data(micro_batch.dropout_keys)
            out = self.compute_loss({**parameters, **trained}, frozen, micro_batch.batch, rng, dropout_key=key)
            means = {name: total / jnp.maximum(counts[name], 1e-12) for name, (total, _) in out.terms.items()}
            loss = sum((means[name] * weight for name, (_, weight) in out.terms.items()), jnp.zeros(()))
            reported = {name: mean for name, mean in means.items() if len(means) > 1 and name != "loss"}
            sums = {name: (jnp.float32(value), jnp.float32(count)) for name, (value, count) in out.metrics.items()}
            return loss, (reported, sums)

        def add(total: Any, micro_batch: MicroBatches) -> tuple[Any, None]:
            (loss, report), gradients = jax.value_and_grad(compute, has_aux=True)(trained, micro_batch)
            result = (gradients, loss, report)
            return (result if total is None else jax.tree.map(jnp.add, total, result)), None

        total: Any = None
        for group in inputs.groups:
            first = jax.tree.map(lambda x: x[0], group)
            if len(group.positions) == 1:
                total, _ = add(total, first)
                continue
            if total is None:  # zeros rather than a first pass of its own, which would be compiled twice
                shapes = jax.eval_shape(lambda micro_batch: add(None, micro_batch)[0], first)
                total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            total, _ = jax.lax.scan(add, total, group)
        gradients, loss, (means, sums) = total
        return gradients, loss, means, sums

    def _add_penalty(self, state: TrainState, gradients: dict[str, Array]) -> tuple[Array | None, dict[str, Array]]:
        """Return the penalty of the task on the weights, and the gradients with that of the penalty."""

        def compute(trained: Parameters) -> Array | None:
            return self.task.penalty({**state.parameters, **trained}, state.task_state)

        trained = {name: state.parameters[name] for name in gradients}
        if jax.eval_shape(compute, trained) is None:
            return None, gradients
        penalty, added = jax.value_and_grad(compute)(trained)
        return penalty, jax.tree.map(jnp.add, gradients, added)

    def _guard(self, state: TrainState, probe: Array, is_skipped: Array) -> tuple[Array, Array, Array]:
        """Return whether the update is skipped, the new `nan_after_bad_step`, and the number of bad steps."""
        # x - x is 0 for a finite number and NaN otherwise.
        nan_if_bad = jnp.where(is_skipped, 0.0, probe - probe) + state.nan_after_bad_step
        is_bad = jnp.isnan(nan_if_bad)
        continues = self.training.on_nonfinite == "skip"
        new_nan = state.nan_after_bad_step if continues else nan_if_bad
        return is_bad | is_skipped, new_nan, state.bad_steps + is_bad

    def _update(
        self, state: TrainState, gradients: Mapping[str, Array], norm: Array, inputs: StepInputs, skip: Array
    ) -> TrainState:
        """Clip, update and average the weights; a skipped update changes nothing but the average."""
        max_norm = self.training.max_grad_norm
        if max_norm is not None:
            divisor = jnp.maximum(norm / max_norm, 1.0)
            gradients = {name: gradient / divisor for name, gradient in gradients.items()}
        updated, states = compute_updates(
            gradients, state.optimizer, state.parameters, self.assigned, self.training.optimizer, inputs.rate
        )

        def select(old: Array, new: Array) -> Array:
            return jnp.where(skip, old, new.astype(old.dtype))

        parameters = {**state.parameters, **{n: select(state.parameters[n], new) for n, new in updated.items()}}
        optimizer = {**state.optimizer, **{n: jax.tree.map(select, state.optimizer[n], s) for n, s in states.items()}}
        weight = 1 - inputs.average_decay
        average = {n: old + weight * (parameters[n] - old) for n, old in state.average.items()}
        shapes = {name: value.shape for name, value in parameters.items()}
        return state._replace(
            parameters=self.mesh.constrain(parameters),
            optimizer=self.mesh.constrain_states(optimizer, shapes),
            average=self.mesh.constrain(average),
        )
