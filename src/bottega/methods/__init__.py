"""The method layer: a technique makes another lesson of a lesson, whatever its task and medium.

One file, one technique: `apply(lesson, options, recipe, branch)`. What it computes stands in `techniques`, which knows
no data and no recipe; here it is joined with both.
"""

from __future__ import annotations

from importlib import import_module

from bottega.branches.branch import Branch
from bottega.core.errors import UsageError
from bottega.methods.lesson import Lesson
from bottega.schema.recipe import Recipe

MODULES = {name: f"bottega.methods.{name}" for name in ("lora", "adapter", "distill", "ewc", "replay", "maml")}


def applied(recipe: Recipe, branch: Branch) -> Lesson:
    """What a branch teaches, changed by the techniques of the recipe in their order."""
    lesson = Lesson.of(branch)
    names = [technique.name for technique in recipe.techniques]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"techniques: {name} is listed {names.count(name)} times; keep one")
    for technique in recipe.techniques:
        lesson = import_module(MODULES[technique.name]).apply(lesson, technique.options, recipe, branch)
    if recipe.data.mixture == "sequence":
        lesson = import_module("bottega.methods.continual").watched(lesson, recipe)
    return lesson
