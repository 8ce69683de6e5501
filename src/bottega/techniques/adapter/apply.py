"""Adapters in a recipe: only bottleneck layers behind the blocks' outputs are trained and saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bottega.config.recipe import Recipe
from bottega.core.task import Task
from bottega.tasks.workload import Workload
from bottega.techniques.adapter.config import AdapterOptions
from bottega.techniques.apply_injection import apply_injection
from bottega.techniques.training_plan import TrainingPlan

if TYPE_CHECKING:
    from bottega.techniques.adapter.torch import Adapter


def apply(plan: TrainingPlan, options: AdapterOptions, recipe: Recipe, workload: Workload) -> TrainingPlan:
    """Add bottleneck adapters to the model and train only them."""
    return apply_injection(plan, options, recipe, workload, name="adapter")


def inject(task: Task, options: AdapterOptions, **injection_options: Any) -> Adapter:
    """Wrap a task so that its model has adapters.

    `injection_options` are further fields of `InjectedTask`: `train` or `random_modules`, and `start`.
    """
    from bottega.techniques.adapter.torch import Adapter

    return Adapter(inner=task, size=options.size, targets=options.targets, **injection_options)
