"""Application of a recipe's techniques: each changes the training plan, for any task and medium."""

from __future__ import annotations

from typing import Any

from bottega.config.recipe import Recipe
from bottega.config.technique_spec import TECHNIQUES
from bottega.config.techniques import Technique
from bottega.core.model_spec import resolve_reference
from bottega.tasks.workload import Workload
from bottega.techniques.continual.apply import track_forgetting
from bottega.techniques.online import apply_stream
from bottega.techniques.plasticity.config import SPEC as PLASTICITY
from bottega.techniques.training_plan import OpenRun, TrainingPlan


def resolve_techniques(recipe: Recipe, workload: Workload) -> tuple[Technique, ...]:
    """Return the techniques of the recipe.

    Plasticity is added if `model.plasticity` is set, or if a stream trains spiking units.
    """
    listed = tuple(recipe.techniques)
    recipes = getattr(workload, "recipes", {"": recipe})
    models = [task_recipe.model for task_recipe in recipes.values()]
    is_requested = any(getattr(model, "plasticity", False) for model in models)
    is_streamed = recipe.data.online is not None and any(map(_has_spiking_units, models))
    if any(technique.name == PLASTICITY.name for technique in listed) or not (is_requested or is_streamed):
        return listed
    return (*listed, Technique(name=PLASTICITY.name))


def _has_spiking_units(model: Any) -> bool:
    is_spiking = "spiking" in (getattr(model, "kind", None), getattr(model, "router", None))
    return is_spiking or getattr(model, "spike_threshold", None) is not None


def apply_techniques(recipe: Recipe, workload: Workload, *, open_run: OpenRun) -> TrainingPlan:
    """Return the training plan of a workload, changed by the techniques of the recipe in their order.

    `open_run` opens another run that a technique depends on, such as a teacher.
    """
    plan = TrainingPlan.from_workload(workload, open_run=open_run)
    for technique in resolve_techniques(recipe, workload):
        plan = resolve_reference(TECHNIQUES[technique.name].apply)(plan, technique.options, recipe, workload)
    if recipe.data.mixture == "sequence":
        plan = track_forgetting(plan, recipe)
    if recipe.data.online is not None:
        plan = apply_stream(plan, recipe, workload)
    return plan
