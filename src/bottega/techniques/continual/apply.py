"""Training on a sequence of sources: metrics per source, and a matrix of what is forgotten."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bottega.config.data import get_source_names
from bottega.config.recipe import Recipe
from bottega.core.engine import Engine
from bottega.core.errors import UsageError
from bottega.core.trainer import BestMetric
from bottega.data.loading.loader import Loader
from bottega.data.order.sequential import Sequential
from bottega.techniques.continual.forgetting import ForgettingMatrix
from bottega.techniques.continual.per_source_metrics import PerSourceMetrics
from bottega.techniques.training_plan import TrainingPlan


def require_sequence(plan: TrainingPlan, technique: str) -> Sequential:
    """Return the order of sources; raise UsageError if they are not trained in sequence."""
    if not isinstance(plan.order, Sequential):
        raise UsageError(
            f"techniques: {technique} needs sources trained in sequence; set data.mixture: sequence, with two data.sources or "
            "more"
        )
    return plan.order


def track_forgetting(plan: TrainingPlan, recipe: Recipe) -> TrainingPlan:
    """Return the plan of a sequence with metrics per source and a forgetting matrix. Applied after all techniques."""
    names = tuple(get_source_names(recipe.data.sources or ()))
    if plan.validation is None:
        note = "no data.validation, so forgetting is not measured; set it to a fraction such as {split: 0.1}"
        return replace(plan, notes=(*plan.notes, note))
    first_index = np.zeros(1, np.int64)
    if "source" not in plan.validation.rows(first_index, first_index):
        note = (
            "data.validation is a separate file and no source lists its labels, so the source of a sample is unknown and "
            "there is no forgetting matrix"
        )
        return replace(plan, notes=(*plan.notes, note))
    matrix = ForgettingMatrix(names, BestMetric(recipe.evaluation.metric, recipe.evaluation.is_maximised))

    def set_first_steps(engine: Engine, loader: Loader, *, resumed: bool) -> None:
        assert isinstance(loader.order, Sequential), "data.mixture is sequence"
        matrix.first_steps = loader.order.schedule.first_steps(loader.batch_size)

    tracked_plan = replace(
        plan,
        task=PerSourceMetrics(inner=plan.task, names=names),
        callbacks=(*plan.callbacks, matrix),
        summarise=matrix.summarise,
        on_train_end=matrix.write,
    )
    return tracked_plan.with_train_start_hook(set_first_steps)
