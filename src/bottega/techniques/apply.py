"""Techniques in a run: each makes another lesson of a lesson, whatever its task and medium."""

from __future__ import annotations

from typing import Any

from bottega.config.recipe import Recipe
from bottega.config.technique_spec import TECHNIQUES
from bottega.config.techniques import Technique
from bottega.core.errors import UsageError
from bottega.core.model_spec import resolve_reference
from bottega.tasks.workload import Workload
from bottega.techniques.continual.apply import track_forgetting
from bottega.techniques.online import apply_stream
from bottega.techniques.plasticity.config import SPEC as PLASTICITY
from bottega.techniques.training_plan import OpenRun, TrainingPlan


def resolve_techniques(recipe: Recipe, workload: Workload) -> tuple[Technique, ...]:
    """Those that are listed, and plasticity where the model asks for it (`model.plasticity`), or where a stream meets
    spiking units: they then also learn by the timing of spikes."""
    listed = tuple(recipe.techniques)
    parts = getattr(workload, "recipes", {"": recipe})
    models = [part.model for part in parts.values()]
    asked = any(getattr(model, "plasticity", False) for model in models)
    streamed = recipe.data.online is not None and any(map(_spikes, models))
    if any(one.name == PLASTICITY.name for one in listed) or not (asked or streamed):
        return listed
    return (*listed, Technique(name=PLASTICITY.name))


def _spikes(model: Any) -> bool:
    is_spiking = "spiking" in (getattr(model, "kind", None), getattr(model, "router", None))
    return is_spiking or getattr(model, "spike_threshold", None) is not None


def apply_techniques(recipe: Recipe, workload: Workload, *, open_run: OpenRun) -> TrainingPlan:
    """What a branch teaches, changed by the techniques of the recipe in their order.

    `open_run` opens another run that a technique is built on, such as a teacher.
    """
    plan = TrainingPlan.from_workload(workload, open_run=open_run)
    techniques = resolve_techniques(recipe, workload)
    names = [technique.name for technique in techniques]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"techniques: {name} is listed {names.count(name)} times; keep one")
    for technique in techniques:
        plan = resolve_reference(TECHNIQUES[technique.name].apply)(plan, technique.options, recipe, workload)
    if recipe.data.mixture == "sequence":
        plan = track_forgetting(plan, recipe)
    if recipe.data.online is not None:
        plan = apply_stream(plan, recipe, workload)
    return plan
