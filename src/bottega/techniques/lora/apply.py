"""LoRA in a recipe: only low-rank updates of the model's layers are trained and saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bottega.config.recipe import Recipe
from bottega.core.task import Task
from bottega.tasks.workload import Workload
from bottega.techniques.apply_injection import apply_injection
from bottega.techniques.lora.config import LoraOptions
from bottega.techniques.training_plan import TrainingPlan

if TYPE_CHECKING:
    from bottega.techniques.lora.torch import Lora


def apply(plan: TrainingPlan, options: LoraOptions, recipe: Recipe, workload: Workload) -> TrainingPlan:
    """Add low-rank updates to the model and train only them."""
    return apply_injection(plan, options, recipe, workload, name="lora")


def inject(task: Task, options: LoraOptions, **injection_options: Any) -> Lora:
    """Wrap a task so that its model has low-rank updates; alpha defaults to twice the rank.

    `injection_options` are further fields of `InjectedTask`: `train` or `random_modules`, and `start`.
    """
    from bottega.techniques.lora.torch import Lora

    alpha = options.alpha if options.alpha is not None else 2.0 * options.rank
    low_rank = {"rank": options.rank, "alpha": alpha, "dropout": options.dropout}
    return Lora(inner=task, targets=options.targets, **low_rank, **injection_options)
