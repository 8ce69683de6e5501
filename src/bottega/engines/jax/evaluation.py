"""Evaluation of one batch in JAX, with its sums and the values of each example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from bottega.core.batch import batch_length
from bottega.core.engine import EvaluationOutput
from bottega.core.task import Task
from bottega.core.types import Batch, Sums
from bottega.engines.jax.inputs import move_batch
from bottega.engines.jax.sums import SAMPLE_INDEX, DeviceSum
from bottega.models.jax_noise import JaxNoise, derive_noise_keys

if TYPE_CHECKING:
    from bottega.engines.jax.engine import JaxEngine

EVALUATION_STEP = -1
"""The step number of the noise in evaluations."""
Evaluator = Callable[..., tuple[dict[str, Any], dict[str, tuple[Any, Any]], dict[str, Any]]]
WEIGHT = "weight"


def evaluate_batch(engine: JaxEngine, batch: Batch, task: Task, *, with_rows: bool) -> EvaluationOutput:
    """Return the sums of the metrics over one batch, and with `with_rows` the values of each example."""
    if engine.world_size > 1:
        batch = _pad_examples(batch, engine.mesh.num_data // engine.data_size)
    counts = {name: engine.mesh.put_count(count) for name, count in task.counts(batch).items()}
    # A sample has the same noise in every evaluation, whatever its batch, and never the noise of training.
    positions = np.asarray(batch.get(SAMPLE_INDEX, np.arange(batch_length(batch))))
    device_batch = move_batch(engine, {name: value for name, value in batch.items() if name != SAMPLE_INDEX})
    keys = derive_noise_keys(engine.seed, EVALUATION_STEP, task.noise_names)
    evaluate = engine.get_evaluator(task)
    terms, metrics, rows = evaluate(
        engine.get_evaluation_weights(),
        engine.frozen_weights,
        device_batch,
        engine.mesh.put_batch(positions.astype(np.uint32)),
        counts,
        keys,
    )
    sums: Sums = {
        name: (DeviceSum((total,)), DeviceSum((count,))) for name, (total, count) in {**terms, **metrics}.items()
    }
    if not with_rows or not rows:
        return EvaluationOutput(sums)
    if SAMPLE_INDEX not in batch:
        rows = {name: values for name, values in rows.items() if name != SAMPLE_INDEX}
    return EvaluationOutput(sums, rows)


def _pad_examples(batch: Batch, multiple: int) -> dict[str, Any]:
    """Return a batch with examples of weight 0 at its end, so that the devices of a process divide it."""
    size = batch_length(batch)
    padding = -size % multiple
    weighted = {WEIGHT: np.ones(size, np.float32), **batch}

    def pad(value: Any) -> Any:
        return np.pad(value, ((0, padding), *((0, 0),) * (value.ndim - 1))) if np.ndim(value) else value

    padded: dict[str, Any] = jax.tree.map(pad, weighted)
    return padded if padding else dict(batch)


def build_evaluator(engine: JaxEngine, task: Task) -> Evaluator:
    """Return the jitted function that computes terms, metrics and rows of a batch; the rows are on every device."""
    replicated = engine.mesh.replicated

    def evaluate(
        parameters: Mapping[str, Any],
        frozen: Mapping[str, Any],
        batch: Any,
        positions: Any,
        counts: Mapping[str, Any],
        keys: Mapping[str, Any],
    ) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]], dict[str, Any]]:
        rng = JaxNoise(engine.seed, EVALUATION_STEP, positions, keys=keys)
        out = engine.builder.compute_loss(parameters, frozen, batch, rng, dropout_key=None, task=task)
        metrics = {name: (jnp.float32(value), jnp.float32(count)) for name, (value, count) in out.metrics.items()}
        terms = {name: (total, jnp.sum(counts[name])) for name, (total, _) in out.terms.items()}
        rows = {**out.rows, SAMPLE_INDEX: positions} if out.rows else {}
        if rows:  # always: batches with and without padding examples are joined
            rows[WEIGHT] = batch[WEIGHT] if WEIGHT in batch else jnp.ones(len(positions))
        if engine.world_size > 1:
            rows = {name: jax.lax.with_sharding_constraint(value, replicated) for name, value in rows.items()}
        return terms, metrics, rows

    return jax.jit(evaluate)
