"""Multitask learning: one model, a sub-batch for each task, and the weighted sum of their losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, final

import torch

from bottega.core.model_spec import ModelSpec
from bottega.core.noise import Noise, derive_seed
from bottega.core.task import Task
from bottega.core.types import Array, Batch, Loss, Models, Rows, Sums
from bottega.models.multitask import PARTS

COUNTED = "counted"
"""Key of the weights beside the rows of a part: rows of weight 0 are padding, and do not count in metrics and updates."""


class Multitask(Task):
    """The weighted sum of the losses of several tasks, its parts.

    A batch is {part: sub-batch of that part's task}, with the same number of rows for each; a part that is missing is skipped.
    Optional: `weight` (batch,) beside them, 0 for a row that is padding in every part. Terms, metrics, rows, statistics and
    state of a part are named PART/NAME.
    """

    parts: dict[str, Task]
    weights: dict[str, float]
    """Weight of each part's loss in the sum."""
    balance: Literal["fixed", "uncertainty", "pcgrad"] = "fixed"
    """`uncertainty` learns a log variance s for each part (Kendall et al., 2018), whose loss L becomes exp(-s) L + s / 2.
    `pcgrad` projects conflicting gradients of the parts before they are summed (Yu et al., 2020)."""

    @property
    def gradient_surgery(self) -> bool:  # type: ignore[override]
        return self.balance == "pcgrad"

    @property
    def update_inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        inputs = {name: part.update_inputs for name, part in self.parts.items()}
        return tuple(f"{name}/{row}" for name, rows in inputs.items() if rows for row in (*rows, COUNTED))

    def specs(self) -> dict[str, ModelSpec]:
        specs = {name: part.specs() for name, part in self.parts.items()}
        # Shared layers are taken from a part with pretrained weights, if there is one.
        pretrained_first = sorted(self.parts, key=lambda name: getattr(self.parts[name], "pretrained", None) is None)
        models = {name: part_specs.pop("model") for name, part_specs in specs.items()}
        options = {"priority": pretrained_first, "log_variances": self.balance == "uncertainty"}
        frozen = {f"{name}/{inner}": spec for name, part_specs in specs.items() for inner, spec in part_specs.items()}
        return {"model": ModelSpec("bottega.models.multitask:MultitaskModel", options=options, parts=models), **frozen}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        counts: dict[str, float] = {}
        for name, part in self.parts.items():
            if name in batch:
                counts |= add_prefix(name, part.counts(select_part_batch(batch, name)))
        return counts

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        terms: dict[str, tuple[Array, Any]] = {}
        metrics: Sums = {}
        rows: dict[str, Array] = {}
        stats: dict[str, Array] = {}
        precisions = models["model"](None) if self.balance == "uncertainty" else None
        for number, name in enumerate(self.parts):
            if name not in batch:
                continue
            sub_batch = select_part_batch(batch, name)
            part_loss = self.parts[name].loss(build_part_models(models, name), sub_batch, _derive_part_rng(name, rng))
            weight: Any = self.weights[name] if precisions is None else self.weights[name] * precisions[number]
            terms |= add_prefix(
                name, {term: (total, scale * weight) for term, (total, scale) in part_loss.terms.items()}
            )
            metrics |= add_prefix(name, part_loss.metrics)
            stats |= add_prefix(name, part_loss.stats)
            if precisions is not None:
                metrics[f"{name}/weight"] = (weight.detach(), torch.ones_like(weight))
            rows |= add_prefix(name, part_loss.rows)
            if part_loss.rows and ("weight" in sub_batch or not models["model"].training):
                ones = torch.ones(len(next(iter(part_loss.rows.values()))), device=rng.positions.device)
                rows[f"{name}/{COUNTED}"] = sub_batch.get("weight", ones)
        return Loss(terms, metrics, rows, stats)

    def score(self, rows: Rows) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, part in self.parts.items():
            part_rows = strip_prefix(name, rows)
            if part_rows:
                counted = part_rows.pop(COUNTED) > 0
                metrics |= add_prefix(name, part.score({key: value[counted] for key, value in part_rows.items()}))
        return metrics

    def penalty(self, parameters: Mapping[str, Array], state: Mapping[str, Array]) -> Array | None:
        if self.balance != "uncertainty":
            return None
        # Half of each log variance, which keeps them from growing without bound.
        return torch.stack([parameters[f"log_variance.{name}"] for name in self.parts]).sum() / 2

    def state(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        state: dict[str, Array] = {}
        for name, part in self.parts.items():
            state |= add_prefix(name, part.state(select_part_tensors(name, parameters)))
        return state

    def update(self, tensors: Mapping[str, Array], batch_stats: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        """Apply the updates of the parts in order; a part reads a shared tensor as the parts before it have updated it."""
        updated: dict[str, Array] = {}
        latest_values: dict[int, Array] = {}  # by identity: a shared tensor has a name in each part
        for name, part in self.parts.items():
            all_names = {key: key for key in tensors}
            names = {**select_part_tensors(name, all_names), **strip_prefix(name, all_names)}
            part_values = {
                key: latest_values.get(id(tensors[full_name]), tensors[full_name]) for key, full_name in names.items()
            }
            stats = _drop_padding(strip_prefix(name, batch_stats), part.update_inputs)
            for key, new_value in part.update(part_values, stats, _derive_part_rng(name, rng)).items() if stats else ():
                updated[names[key]] = latest_values[id(tensors[names[key]])] = new_value
        return updated

    def batch_metrics(self, batch_stats: Mapping[str, Array]) -> dict[str, Array]:
        metrics: dict[str, Array] = {}
        for name, part in self.parts.items():
            part_stats = strip_prefix(name, batch_stats)
            metrics |= add_prefix(name, part.batch_metrics(part_stats)) if part_stats else {}
        return metrics


def _derive_part_rng(name: str, rng: Noise) -> Noise:
    """Derive the noise of a part, so that parts do not draw the same numbers for samples at the same position."""
    return replace(rng, seed=derive_seed("part", name, rng.seed))


def _drop_padding(stats: dict[str, Array], row_names: tuple[str, ...]) -> dict[str, Array]:
    """Return a part's statistics; those named by `row_names` have a row for each example and lose their padding rows.

    A batch without padding has no COUNTED, since selecting rows by a mask on the device makes the host wait.
    """
    counted = stats.pop(COUNTED, None)
    if counted is None:
        return stats
    return {key: value[counted > 0] if key in row_names else value for key, value in stats.items()}


def add_prefix(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Rename every key of a part's values to NAME/KEY."""
    return {f"{name}/{key}": value for key, value in values.items()}


def strip_prefix(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of one part under its own keys, the inverse of `add_prefix`."""
    return {key.removeprefix(f"{name}/"): value for key, value in values.items() if key.startswith(f"{name}/")}


def select_part_tensors(name: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of one part of the model under the names they have in that part."""
    prefix = f"{PARTS}.{name}."
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def select_part_batch(batch: Batch, name: str) -> dict[str, Any]:
    """Return the sub-batch of one part; padding rows of the batch are padding rows of the part."""
    sub_batch = dict(batch[name])
    if "weight" in batch:
        weight = batch["weight"]
        sub_batch["weight"] = weight * sub_batch["weight"] if "weight" in sub_batch else weight
    return sub_batch


def build_part_models(models: Models, name: str) -> dict[str, Any]:
    """Return the models for the loss of a part; its module is called through the whole model, which may be wrapped."""
    return {"model": _PartCall(models["model"], name), **strip_prefix(name, models)}


def get_part_modules(models: Models, name: str) -> dict[str, Any]:
    """Return the models of a part with its own module, for sampling and export."""
    return {"model": models["model"].part(name), **strip_prefix(name, models)}


@final
class _PartCall:
    """Calls one part of a multitask model, which DDP or torch.compile may have wrapped."""

    def __init__(self, model: Any, name: str) -> None:
        self.model, self.name = model, name

    @property
    def training(self) -> bool:
        return bool(self.model.training)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(self.name, *args, **kwargs)
