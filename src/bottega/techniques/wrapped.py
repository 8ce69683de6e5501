"""A task around a task: what a technique adds, with everything else as it was."""

from __future__ import annotations

from collections.abc import Mapping

from bottega.core.model_spec import ModelSpec
from bottega.core.noise import Noise
from bottega.core.task import Task
from bottega.core.types import Array, Batch, Loss, Models, Rows


class Wrapped(Task):
    """Passes everything on to `inner`; a technique changes what it is about."""

    inner: Task

    @property
    def rebinds(self) -> bool:  # type: ignore[override]
        return self.inner.rebinds

    @property
    def keeps_apart(self) -> bool:  # type: ignore[override]
        return self.inner.keeps_apart

    @property
    def learns_from_rows(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner.learns_from_rows

    def specs(self) -> dict[str, ModelSpec]:
        return self.inner.specs()

    def counts(self, batch: Batch) -> Mapping[str, float]:
        return self.inner.counts(batch)

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        return self.inner.loss(models, batch, rng)

    def score(self, rows: Rows) -> dict[str, float]:
        return self.inner.score(rows)

    def learns(self, name: str) -> bool:
        return self.inner.learns(name)

    def state(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        return self.inner.state(parameters)

    def penalty(self, parameters: Mapping[str, Array], state: Mapping[str, Array]) -> Array | None:
        return self.inner.penalty(parameters, state)

    def update(self, tensors: Mapping[str, Array], seen: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        return self.inner.update(tensors, seen, rng)

    def observed(self, seen: Mapping[str, Array]) -> dict[str, Array]:
        return self.inner.observed(seen)
