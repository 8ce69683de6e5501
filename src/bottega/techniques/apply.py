"""Techniques in a run: each makes another lesson of a lesson, whatever its task and medium."""

from __future__ import annotations

from typing import Any

from bottega.config.recipe import Recipe
from bottega.config.technique_spec import TECHNIQUES
from bottega.config.techniques import Technique
from bottega.core.errors import UsageError
from bottega.core.model_spec import resolve
from bottega.tasks.branch import Branch
from bottega.techniques.continual.apply import watched
from bottega.techniques.lesson import Lesson, OpenRun
from bottega.techniques.online import streamed
from bottega.techniques.plasticity.config import SPEC as PLASTICITY


def all_of_them(recipe: Recipe, branch: Branch) -> tuple[Technique, ...]:
    """Those that are listed, and plasticity where the model asks for it (`model.plasticity`), or where a stream meets
    spiking units: they then also learn by the timing of spikes."""
    listed = tuple(recipe.techniques)
    parts = getattr(branch, "recipes", {"": recipe})
    models = [part.model for part in parts.values()]
    asked = any(getattr(model, "plasticity", False) for model in models)
    streamed = recipe.data.online is not None and any(map(_spikes, models))
    if any(one.name == PLASTICITY.name for one in listed) or not (asked or streamed):
        return listed
    return (*listed, Technique(name=PLASTICITY.name))


def _spikes(model: Any) -> bool:
    is_spiking = "spiking" in (getattr(model, "kind", None), getattr(model, "router", None))
    return is_spiking or getattr(model, "spike_threshold", None) is not None


def apply_techniques(recipe: Recipe, branch: Branch, *, open_run: OpenRun) -> Lesson:
    """What a branch teaches, changed by the techniques of the recipe in their order.

    `open_run` opens another run that a technique is built on, such as a teacher.
    """
    lesson = Lesson.of(branch, open_run=open_run)
    techniques = all_of_them(recipe, branch)
    names = [technique.name for technique in techniques]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"techniques: {name} is listed {names.count(name)} times; keep one")
    for technique in techniques:
        lesson = resolve(TECHNIQUES[technique.name].apply)(lesson, technique.options, recipe, branch)
    if recipe.data.mixture == "sequence":
        lesson = watched(lesson, recipe)
    if recipe.data.online is not None:
        lesson = streamed(lesson, recipe, branch)
    return lesson
