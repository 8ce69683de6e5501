"""Adapters: only narrow layers behind the model's outputs learn, and only they are saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bottega.config.recipe import Recipe
from bottega.core.task import Task
from bottega.tasks.branch import Branch
from bottega.techniques.adapter.config import AdapterOptions
from bottega.techniques.injection import adapted
from bottega.techniques.lesson import Lesson

if TYPE_CHECKING:
    from bottega.techniques.adapter.torch import Adapter


def apply(lesson: Lesson, options: AdapterOptions, recipe: Recipe, branch: Branch) -> Lesson:
    return adapted(lesson, options, recipe, branch, name="adapter")


def inject(task: Task, options: AdapterOptions, **shared: Any) -> Adapter:
    from bottega.techniques.adapter.torch import Adapter

    return Adapter(inner=task, size=options.size, targets=options.targets, **shared)
