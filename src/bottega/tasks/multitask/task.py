"""Several tasks at once: one model, a block of the batch for each, and the sum of what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, final

import torch

from bottega.core.model_spec import ModelSpec
from bottega.core.noise import Noise, derive_seed
from bottega.core.task import Task
from bottega.core.types import Array, Batch, Loss, Models, Rows, Sums
from bottega.models.several import PARTS

COUNTED = "counted"


class Multitask(Task):
    """A batch holds a block for each part, {part: {...}}, as that part's task expects it; all have equally many rows.

    Optional: `weight` [b] beside them, where 0 marks a row that counts for no part. A part that is not there is left out.
    Everything a part says is named PART/NAME.
    """

    parts: dict[str, Task]
    weights: dict[str, float]
    """Of each part's loss in the sum."""
    balance: Literal["fixed", "uncertainty", "pcgrad"] = "fixed"
    """uncertainty learns a log variance s of each part (Kendall et al., 2018): its loss L costs exp(-s) L + s / 2. pcgrad
    adds gradients up once they no longer point against each other (Yu et al., 2020)."""

    @property
    def gradient_surgery(self) -> bool:  # type: ignore[override]
        return self.balance == "pcgrad"

    @property
    def update_inputs(self) -> tuple[str, ...]:  # type: ignore[override]
        asked = {name: part.update_inputs for name, part in self.parts.items()}
        return tuple(f"{name}/{row}" for name, rows in asked.items() if rows for row in (*rows, COUNTED))

    def specs(self) -> dict[str, ModelSpec]:
        specs = {name: part.specs() for name, part in self.parts.items()}
        # Weights that were learnt before are worth more than drawn ones, whichever part brings them.
        first = sorted(self.parts, key=lambda name: getattr(self.parts[name], "pretrained", None) is None)
        models = {name: own.pop("model") for name, own in specs.items()}
        options = {"first": first, "log_variances": self.balance == "uncertainty"}
        frozen = {f"{name}/{inner}": spec for name, own in specs.items() for inner, spec in own.items()}
        return {"model": ModelSpec("bottega.models.several:Several", options=options, parts=models), **frozen}

    def counts(self, batch: Batch) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for name, part in self._of(batch).items():
            found |= add_prefix(name, part.counts(part_batch(batch, name)))
        return found

    def loss(self, models: Models, batch: Batch, rng: Noise) -> Loss:
        terms: dict[str, tuple[Array, Any]] = {}
        metrics: Sums = {}
        rows: dict[str, Array] = {}
        stats: dict[str, Array] = {}
        trust = models["model"](None) if self.balance == "uncertainty" else None
        for number, name in enumerate(self.parts):
            if name not in batch:
                continue
            own = part_batch(batch, name)
            out = self.parts[name].loss(part_models(models, name), own, _rng_of(name, rng))
            weight: Any = self.weights[name] if trust is None else self.weights[name] * trust[number]
            terms |= add_prefix(name, {term: (total, inner * weight) for term, (total, inner) in out.terms.items()})
            metrics |= add_prefix(name, out.metrics)
            stats |= add_prefix(name, out.stats)
            if trust is not None:
                metrics[f"{name}/weight"] = (weight.detach(), torch.ones_like(weight))
            rows |= add_prefix(name, out.rows)
            if out.rows and ("weight" in own or not models["model"].training):
                all_of_them = torch.ones(len(next(iter(out.rows.values()))), device=rng.positions.device)
                rows[f"{name}/{COUNTED}"] = own.get("weight", all_of_them)
        return Loss(terms, metrics, rows, stats)

    def score(self, rows: Rows) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, part in self.parts.items():
            own = strip_prefix(name, rows)
            if own:
                counted = own.pop(COUNTED) > 0
                found |= add_prefix(name, part.score({key: value[counted] for key, value in own.items()}))
        return found

    def penalty(self, parameters: Mapping[str, Array], state: Mapping[str, Array]) -> Array | None:
        if self.balance != "uncertainty":
            return None
        # Half of each log variance, which is what keeps them from growing without end.
        return torch.stack([parameters[f"log_variance.{name}"] for name in self.parts]).sum() / 2

    def state(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for name, part in self.parts.items():
            found |= add_prefix(name, part.state(part_tensors(name, parameters)))
        return found

    def update(self, tensors: Mapping[str, Array], seen: Mapping[str, Array], rng: Noise) -> Mapping[str, Array]:
        """Each part's own, one after the other: of what they share, the next one changes what the last one made of it."""
        found: dict[str, Array] = {}
        by_now: dict[int, Array] = {}  # a shared tensor has a name in each part
        for name, part in self.parts.items():
            places = {**part_tensors(name, tensors, whole=True), **strip_prefix(name, {key: key for key in tensors})}
            own = {key: by_now.get(id(tensors[place]), tensors[place]) for key, place in places.items()}
            shown = _counted(strip_prefix(name, seen), part.update_inputs)
            for key, new in part.update(own, shown, _rng_of(name, rng)).items() if shown else ():
                found[places[key]] = by_now[id(tensors[places[key]])] = new
        return found

    def batch_metrics(self, seen: Mapping[str, Array]) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for name, part in self.parts.items():
            own = strip_prefix(name, seen)
            found |= add_prefix(name, part.batch_metrics(own)) if own else {}
        return found

    def _of(self, batch: Batch) -> dict[str, Task]:
        return {name: part for name, part in self.parts.items() if name in batch}


def _rng_of(name: str, rng: Noise) -> Noise:
    """Parts must not draw the same numbers for the samples that happen to lie side by side."""
    return replace(rng, seed=derive_seed("part", name, rng.seed))


def _counted(seen: dict[str, Array], rows: tuple[str, ...]) -> dict[str, Array]:
    """What a part has seen, without the rows that count for nobody. Where all of them count, nothing says so: to select by
    what is on the device is to wait for it."""
    counted = seen.pop(COUNTED, None)
    return seen if counted is None else {k: v[counted > 0] if k in rows else v for k, v in seen.items()}


def add_prefix(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}/{key}": value for key, value in values.items()}


def strip_prefix(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The other way: what one part says, under its own names."""
    return {key.removeprefix(f"{name}/"): value for key, value in values.items() if key.startswith(f"{name}/")}


def part_tensors(name: str, tensors: Mapping[str, Any], *, whole: bool = False) -> dict[str, Any]:
    """A part's tensors, or with `whole` their names in the whole, as its model calls them."""
    inside = f"{PARTS}.{name}."
    return {key.removeprefix(inside): key if whole else t for key, t in tensors.items() if key.startswith(inside)}


def part_batch(batch: Batch, name: str) -> dict[str, Any]:
    """One part's block; what counts for nobody does not count for it."""
    own = dict(batch[name])
    if "weight" in batch:
        own["weight"] = batch["weight"] * own["weight"] if "weight" in own else batch["weight"]
    return own


def part_models(models: Models, name: str) -> dict[str, Any]:
    """The models as a part's loss knows them; its own is called through the one that an engine may have wrapped."""
    return {"model": _Called(models["model"], name), **strip_prefix(name, models)}


def part_modules(models: Models, name: str) -> dict[str, Any]:
    """The same for those who want the part's module itself, to draw from or to export."""
    return {"model": models["model"].part(name), **strip_prefix(name, models)}


@final
class _Called:
    """A part of a model that may be wrapped."""

    def __init__(self, model: Any, name: str) -> None:
        self.model, self.name = model, name

    @property
    def training(self) -> bool:
        return bool(self.model.training)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.model(self.name, *args, **named)
