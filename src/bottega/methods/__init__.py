"""The method layer: a technique makes another lesson of a lesson, whatever its task and medium.

One file, one technique: `apply(lesson, options, recipe, branch)`. What it computes stands in `techniques`, which knows
no data and no recipe; here it is joined with both.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from bottega.branches.branch import Branch
from bottega.core.errors import UsageError
from bottega.methods.lesson import Lesson
from bottega.schema.recipe import Recipe
from bottega.schema.techniques import Technique
from bottega.schema.together import PLASTICITY

MODULES = {
    name: f"bottega.methods.{name}" for name in ("lora", "adapter", "distill", "ewc", "replay", "maml", PLASTICITY)
}


def all_of_them(recipe: Recipe, branch: Branch) -> tuple[Technique, ...]:
    """Those that are listed, and plasticity where the model asks for it (`model.plasticity`), or where a stream meets
    spiking units: they then also learn by the timing of spikes."""
    listed = tuple(recipe.techniques)
    parts = getattr(branch, "recipes", {"": recipe})
    models = [part.model for part in parts.values()]
    asked = any(getattr(model, "plasticity", False) for model in models)
    streamed = recipe.data.online is not None and any(map(_spikes, models))
    if any(one.name == PLASTICITY for one in listed) or not (asked or streamed):
        return listed
    return (*listed, Technique(name=PLASTICITY))


def _spikes(model: Any) -> bool:
    is_spiking = "spiking" in (getattr(model, "kind", None), getattr(model, "router", None))
    return is_spiking or getattr(model, "spike_threshold", None) is not None


def applied(recipe: Recipe, branch: Branch) -> Lesson:
    """What a branch teaches, changed by the techniques of the recipe in their order."""
    lesson = Lesson.of(branch)
    techniques = all_of_them(recipe, branch)
    names = [technique.name for technique in techniques]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"techniques: {name} is listed {names.count(name)} times; keep one")
    for technique in techniques:
        lesson = import_module(MODULES[technique.name]).apply(lesson, technique.options, recipe, branch)
    if recipe.data.mixture == "sequence":
        lesson = import_module("bottega.methods.continual").watched(lesson, recipe)
    if recipe.data.online is not None:
        lesson = import_module("bottega.methods.online").streamed(lesson, recipe, branch)
    return lesson
