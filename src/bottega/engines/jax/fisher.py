"""Diagonal of the empirical Fisher information in JAX: the importance of each weight for some examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from bottega.core.types import Batch
from bottega.engines.jax.inputs import move_batch
from bottega.models.jax_noise import JaxNoise, derive_noise_keys

if TYPE_CHECKING:
    from bottega.engines.jax.engine import JaxEngine

FISHER_STEP = -2
"""The step number of the noise, used neither by training nor by evaluations."""


def fisher_diagonal(
    engine: JaxEngine, examples: Iterable[tuple[int, Batch]], *, count: int, names: Sequence[str]
) -> dict[str, Any]:
    """Return, for each of the parameters `names`, the mean over `count` examples of the squared gradient of one example.

    Gradients are computed for one example at a time, because the square of a mean gradient is another quantity, without
    dropout, and with the current weights, not their average.
    """
    parameters = engine.state.parameters

    def compute_loss(
        trained: Mapping[str, Any],
        others: Mapping[str, Any],
        frozen: Mapping[str, Mapping[str, Any]],
        batch: Any,
        counts: Mapping[str, Any],
        position: Any,
        keys: Mapping[str, Any],
    ) -> Any:
        rng = JaxNoise(engine.seed, FISHER_STEP, position, keys=keys)
        out = engine.builder.compute_loss({**others, **trained}, frozen, batch, rng, dropout_key=None)
        return sum(weight * total / jnp.maximum(counts[name], 1e-12) for name, (total, weight) in out.terms.items())

    @jax.jit
    def add_squares(squares: Any, trained: Any, *arguments: Any) -> Any:
        gradients = jax.grad(compute_loss)(trained, *arguments)
        return jax.tree.map(lambda total, gradient: total + jnp.square(gradient), squares, gradients)

    trained = {name: parameters[name] for name in names}
    # Arguments rather than constants of the jitted function, which would hold copies of them.
    weights = ({name: value for name, value in parameters.items() if name not in trained}, engine.frozen_weights)
    squares = jax.tree.map(jnp.zeros_like, trained)
    keys = derive_noise_keys(engine.seed, FISHER_STEP, engine.task.noise_names)
    for number, example in examples:
        counts = {name: np.float32(value) for name, value in engine.task.counts(example).items()}
        position = np.array([number], np.uint32)
        squares = add_squares(squares, trained, *weights, move_batch(engine, example), counts, position, keys)
    return {name: square / count for name, square in squares.items()}
