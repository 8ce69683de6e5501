"""What a run learns from what: its branch, changed by the techniques of its recipe."""

from __future__ import annotations

from bottega.config.recipe import Recipe
from bottega.tasks.workload import Workload
from bottega.techniques.apply import apply_techniques
from bottega.techniques.training_plan import TrainingPlan


def build_training_plan(recipe: Recipe, workload: Workload) -> TrainingPlan:
    """The lesson of a recipe; what a technique is built on is opened as a run."""
    from bottega.run.saved import open_run

    return apply_techniques(recipe, workload, open_run=open_run)
