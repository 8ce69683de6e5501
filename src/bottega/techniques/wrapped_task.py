"""Base class of techniques that wrap a task."""

from __future__ import annotations

from collections.abc import Mapping

from bottega.core.model_spec import ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Array, Batch, Loss, Models, Rows


class WrappedTask(Task):
    """A task that delegates everything to `inner`; a technique overrides what it changes."""

    inner: Task

    @property
    def needs_unwrapped_model(self) -> bool:  # type: ignore[override]
        return self.inner.needs_unwrapped_model

    @property
    def gradient_surgery(self) -> bool:  # type: ignore[override]
        return self.inner.gradient_surgery

    @property
    def update_inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.update_inputs

    @property
    def noise_names(self) -> tuple[str, ...]:
        return self.inner.noise_names

    def bucket(self, batch: Batch) -> Batch:
        return self.inner.bucket(batch)

    def specs(self) -> dict[str, ModelSpec]:
        return self.inner.specs()

    def counts(self, batch: Batch) -> Mapping[str, float]:
        return self.inner.counts(batch)

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        return self.inner.loss(models, batch, rng)

    def score(self, rows: Rows) -> dict[str, float]:
        return self.inner.score(rows)

    def is_trainable(self, name: str) -> bool:
        return self.inner.is_trainable(name)

    def state(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        return self.inner.state(parameters)

    def penalty(self, parameters: Mapping[str, Array], state: Mapping[str, Array]) -> Array | None:
        return self.inner.penalty(parameters, state)

    def update(self, tensors: Mapping[str, Array], batch_stats: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        return self.inner.update(tensors, batch_stats, rng)

    def batch_metrics(self, batch_stats: Mapping[str, Array]) -> dict[str, Array]:
        return self.inner.batch_metrics(batch_stats)
