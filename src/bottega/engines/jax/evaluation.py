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


def evaluate_batch(engine: JaxEngine, batch: Batch, task: Task, *, with_rows: bool) -> EvaluationOutput:
    """Return the sums of the metrics over one batch, and with `with_rows` the values of each example."""
    counts = task.counts(batch)
    # A sample has the same noise in every evaluation, whatever its batch, and never the noise of training.
    indices = batch.get(SAMPLE_INDEX)
    positions = np.arange(batch_length(batch)) if indices is None else np.asarray(indices)
    device_batch = move_batch(engine, {name: value for name, value in batch.items() if name != SAMPLE_INDEX})
    keys = derive_noise_keys(engine.seed, EVALUATION_STEP, task.noise_names)
    evaluate = engine.get_evaluator(task)
    terms, metrics, rows = evaluate(
        engine.get_evaluation_weights(), engine.frozen_weights, device_batch, positions.astype(np.uint32), keys
    )
    sums: Sums = {name: (DeviceSum((total,)), float(counts[name])) for name, total in terms.items()}
    sums |= {name: (DeviceSum((value,)), DeviceSum((count,))) for name, (value, count) in metrics.items()}
    if not with_rows or not rows:
        return EvaluationOutput(sums)
    rows = dict(rows)
    if indices is not None:
        rows[SAMPLE_INDEX] = positions
    if "weight" in batch:  # padding examples have none
        is_counted = np.asarray(batch["weight"]) > 0
        rows = {name: np.asarray(values)[is_counted] for name, values in rows.items()}
    return EvaluationOutput(sums, rows)


def build_evaluator(engine: JaxEngine, task: Task) -> Evaluator:
    """Return the jitted function that computes terms, metrics and rows of a batch."""

    def evaluate(
        parameters: Mapping[str, Any], frozen: Mapping[str, Any], batch: Any, positions: Any, keys: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]], dict[str, Any]]:
        rng = JaxNoise(engine.seed, EVALUATION_STEP, positions, keys=keys)
        out = engine.builder.compute_loss(parameters, frozen, batch, rng, dropout_key=None, task=task)
        metrics = {name: (jnp.float32(value), jnp.float32(count)) for name, (value, count) in out.metrics.items()}
        return {name: total for name, (total, _) in out.terms.items()}, metrics, dict(out.rows)

    return jax.jit(evaluate)
