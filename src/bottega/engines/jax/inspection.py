"""Inspection of the model with one batch in JAX: gradient norms by module, and the first non-finite value."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from bottega.core.batch import batch_length
from bottega.core.types import Batch
from bottega.engines.jax.devices import describe_device
from bottega.engines.jax.inputs import make_dropout_key, move_batch
from bottega.models.jax_layers import Module, bind, observe_outputs
from bottega.models.jax_noise import JaxNoise

if TYPE_CHECKING:
    from bottega.engines.jax.engine import JaxEngine


def inspect_modules(engine: JaxEngine, batch: Batch) -> dict[str, Any]:
    """Return the loss of a batch and a row for each module with its gradient norm; the weights do not change."""
    loss, gradients = _compute_gradients(engine, 0, batch)
    infos, device = engine.parameters(), describe_device(engine.device)
    squares = {name: float(jnp.sum(jnp.square(gradient))) for name, gradient in gradients.items()}
    rows = []
    for path, module in engine.model.named_modules():
        names = [f"{path}.{name}" if path else name for name in module.variables()]
        if not names:
            continue
        trained = [squares[name] for name in names if name in squares]
        rows.append(
            {
                "name": path or type(module).__name__,
                "kind": type(module).__name__,
                "parameters": sum(infos[name].size for name in names),
                "trainable": sum(infos[name].size for name in names if infos[name].is_trainable),
                "devices": [device],
                "dtypes": sorted({str(engine.state.parameters[name].dtype) for name in names}),
                "gradient_norm": math.sqrt(sum(trained)) if trained else None,
            }
        )
    return {"loss": float(loss), "modules": rows}


def find_nonfinite_module(engine: JaxEngine, step: int, batch: Batch) -> str | None:
    """Run the step's forward again, operation by operation, and its backward.

    Returns the first module with an output that is not finite, or else the first gradient.
    """
    model: Module = bind(engine.builder.model, engine.state.parameters)
    paths = {id(module): path for path, module in model.named_modules()}
    nonfinite: list[str] = []

    def check(module: Module, output: Any) -> None:
        leaves = [leaf for leaf in jax.tree.leaves(output) if isinstance(leaf, jax.Array)]
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)  # inside a loop, which has no values yet
        if not nonfinite and not is_traced and not all(jnp.isfinite(leaf).all() for leaf in leaves):
            nonfinite.append(paths.get(id(module)) or "the model")

    with observe_outputs(check):
        _compute_loss(engine, engine.state.parameters, step, batch, model=model)
    if nonfinite:
        return nonfinite[0]
    _, gradients = _compute_gradients(engine, step, batch)
    return next((f"the gradient of {name}" for name, g in gradients.items() if not jnp.isfinite(g).all()), None)


def _compute_gradients(engine: JaxEngine, step: int, batch: Batch) -> tuple[Any, dict[str, Any]]:
    parameters = engine.state.parameters
    trained = {name: parameters[name] for name in engine.assigned}
    compute = jax.value_and_grad(lambda values: _compute_loss(engine, {**parameters, **values}, step, batch))
    loss, gradients = jax.jit(compute)(trained)
    return loss, gradients


def _compute_loss(engine: JaxEngine, parameters: Any, step: int, batch: Batch, *, model: Module | None = None) -> Any:
    size, counts = batch_length(batch), engine.task.counts(batch)
    positions = np.arange(engine.data_rank * size, (engine.data_rank + 1) * size)
    rng = JaxNoise.of_step(engine.seed, step, positions, engine.task.noise_names)
    out = engine.builder.compute_loss(
        parameters, engine.frozen_weights, move_batch(engine, batch), rng, dropout_key=make_dropout_key(), model=model
    )
    return sum(weight * total / max(counts[name], 1e-12) for name, (total, weight) in out.terms.items())
