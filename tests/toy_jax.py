"""The toy task of `toy_task` in JAX, with the same initial weights, losses and noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bottega.config.training import Training
from bottega.core.model_spec import Initial, ModelSpec
from bottega.core.noise import Noise, numpy_generator
from bottega.core.types import Batch, Loss, Models
from bottega.engines.jax.engine import JaxEngine
from bottega.models.jax_layers import LayerNorm, Linear, Module, dropout
from toy_task import F, T, Toy, training


class Net(Module):
    def __init__(self, dropout_rate: float) -> None:
        self.first = Linear(F, 8)
        self.norm = LayerNorm(8)
        self.second = Linear(8, 8)
        self.head = Linear(8, 1)
        self.dropout_rate = dropout_rate

    def __call__(self, x: Any) -> Any:
        hidden = jnp.tanh(self.second(self.norm(self.first(x))))
        return self.head(dropout(hidden, self.dropout_rate))[..., 0]


def initialise(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    return {
        name: 0.3 * numpy_generator(seed, name).standard_normal(shape, dtype=np.float32)
        + np.float32("norm.weight" in name)
        for name, shape in shapes.items()
    }


class JaxToy(Toy):
    """Squared error over the masked positions, and a term over examples."""

    @property
    def noise_names(self) -> tuple[str, ...]:
        return ("x",)

    def specs(self) -> dict[str, ModelSpec]:
        return {"model": ModelSpec("toy_{framework}:Net", self.dropout, initial=Initial("toy_{framework}:initialise"))}

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        mask = batch["mask"].astype(jnp.float32)
        x = batch["x"] + self.noise * rng.normal("x", (T, F))
        errors = jnp.square(models["model"](x) - batch["y"]) * mask
        means = errors.sum(axis=1) / mask.sum(axis=1)
        metrics = {"absolute": (jnp.sqrt(jax.lax.stop_gradient(errors)).sum(), mask.sum())}
        return Loss(terms={"error": (errors.sum(), 1.0), "mean": (means.sum(), 0.25)}, metrics=metrics)


def jax_engine(
    options: Training | None = None,
    *,
    task: Toy | None = None,
    micro: int | None = None,
    rate: Callable[[int], float] | None = None,
) -> JaxEngine:
    """Return an engine with the defaults of `toy_task.engine`."""
    options = options or training()
    return JaxEngine(
        task or JaxToy(),
        options,
        rate=rate or (lambda step: options.learning_rate / (1 + 0.1 * step)),
        device="cpu",
        micro_batch_size=micro,
    )
