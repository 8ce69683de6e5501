"""Evaluation metrics of each source, beside those over all sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, final

import numpy as np

from bottega.core.noise import Noise
from bottega.core.types import Array, Batch, Loss, Models
from bottega.techniques.wrapped_task import WrappedTask


@final
class PerSourceMetrics(WrappedTask):
    """In an evaluation, also reports each term and metric per source, as `name/metric`.

    A batch has the number of each example's source as `source` `(batch,)`. Examples with a number outside the sources
    count only in the totals.
    """

    names: tuple[str, ...]

    def counts(self, batch: Batch) -> Mapping[str, float]:
        if "source" not in batch:
            return self.inner.counts(batch)
        inputs, source = _drop_source(batch), np.asarray(batch["source"])
        counts = dict(self.inner.counts(inputs))
        for number, name in enumerate(self.names):
            indices = np.flatnonzero(source == number)
            source_counts = (
                self.inner.counts(_select_examples(inputs, indices)) if len(indices) else dict.fromkeys(counts, 0.0)
            )
            counts |= {f"{name}/{term}": count for term, count in source_counts.items()}
        return counts

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        if rng.framework == "jax":
            return self._compute_weighted_loss(models, batch, rng)
        if "source" not in batch or models["model"].training:
            return self.inner.loss(models, _drop_source(batch), rng)
        inputs, source = _drop_source(batch), batch["source"]
        # Each example passes the model once, with those of its source; the totals are sums over sources.
        indices_by_source = [(source == number).nonzero()[:, 0] for number in range(len(self.names))]
        indices_by_source.append(((source < 0) | (source >= len(self.names))).nonzero()[:, 0])
        losses = [
            self.inner.loss(models, _select_examples(inputs, indices), replace(rng, positions=rng.positions[indices]))
            if len(indices)
            else None
            for indices in indices_by_source
        ]
        return self._merge_losses(losses, indices_by_source, num_examples=len(source))

    def _compute_weighted_loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        """Return the loss in JAX, whose shapes cannot depend on the sources: once for each source, the others with weight 0."""
        from bottega.models.jax_layers import is_training

        inputs = _drop_source(batch)
        total = self.inner.loss(models, inputs, rng)
        if "source" not in batch or is_training():
            return total
        source, weight = batch["source"], batch.get("weight", 1.0)
        terms, metrics = dict(total.terms), dict(total.metrics)
        for number, name in enumerate(self.names):
            weights = weight * (source == number).astype("float32")
            loss = self.inner.loss(models, {**inputs, "weight": weights}, rng)
            terms |= {f"{name}/{term}": value for term, value in loss.terms.items()}
            metrics |= {f"{name}/{metric}": value for metric, value in loss.metrics.items()}
        return Loss(terms=terms, metrics=metrics, rows=total.rows)

    def _merge_losses(self, losses: list[Loss | None], indices_by_source: list[Array], *, num_examples: int) -> Loss:
        """Return the loss of the whole batch from those of each source; the last is of examples outside the sources."""
        nonempty = [(loss, at) for loss, at in zip(losses, indices_by_source, strict=True) if loss is not None]
        reference = nonempty[0][0]
        terms = {
            name: (_sum_values(loss.terms[name][0] for loss, _ in nonempty), weight)
            for name, (_, weight) in reference.terms.items()
        }
        metrics = {
            name: (
                _sum_values(loss.metrics[name][0] for loss, _ in nonempty),
                _sum_values(loss.metrics[name][1] for loss, _ in nonempty),
            )
            for name in reference.metrics
        }
        # On a rank without examples of a source its sums are 0 but must exist: ranks are summed name by name.
        for source_name, loss in zip(self.names, losses[:-1], strict=True):
            for name, (total, weight) in reference.terms.items():
                terms[f"{source_name}/{name}"] = (
                    loss.terms[name][0] if loss is not None else total.new_zeros(total.shape),
                    weight,
                )
            for name in reference.metrics:
                metrics[f"{source_name}/{name}"] = loss.metrics[name] if loss is not None else (0.0, 0.0)
        rows: dict[str, Any] = {}
        for name, values in reference.rows.items():
            rows[name] = values.new_empty((num_examples, *values.shape[1:]))
            for source_loss, at in nonempty:
                rows[name][at] = source_loss.rows[name]
        return Loss(terms=terms, metrics=metrics, rows=rows)


def _drop_source(batch: Batch) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "source"}


def _select_examples(batch: Batch, at: Array) -> dict[str, Any]:
    """Return the examples at the indices `at`; scalars belong to the whole batch."""
    return {
        name: _select_examples(value, at) if isinstance(value, Mapping) else value[at] if value.ndim else value
        for name, value in batch.items()
    }


def _sum_values(values: Any) -> Any:
    total, *others = values
    for value in others:
        total = total + value
    return total
