"""A sequence of sources as a lesson: each is measured by itself, and what of it is forgotten is written down."""

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
    if not isinstance(plan.order, Sequential):
        raise UsageError(
            f"techniques: {technique} is about sources that come one after the other; say data.mixture: sequence, with two "
            "data.sources or more"
        )
    return plan.order


def track_forgetting(plan: TrainingPlan, recipe: Recipe) -> TrainingPlan:
    """The lesson of a sequence, once all techniques have had their say."""
    names = tuple(get_source_names(recipe.data.sources or ()))
    if plan.validation is None:
        said = "no data.validation, so that nothing measures what is forgotten; give it a share such as {split: 0.1}"
        return replace(plan, notes=(*plan.notes, said))
    first = np.zeros(1, np.int64)
    if "source" not in plan.validation.rows(first, first):
        said = (
            "data.validation is a file of its own and no source says its labels, so that it is not told which source a sample "
            "measures, and there is no forgetting matrix"
        )
        return replace(plan, notes=(*plan.notes, said))
    watch = ForgettingMatrix(names, BestMetric(recipe.evaluation.metric, recipe.evaluation.is_maximised))

    def begin(engine: Engine, loader: Loader, *, resumed: bool) -> None:
        assert isinstance(loader.order, Sequential), "data.mixture is sequence"
        watch.first_steps = loader.order.first_steps(loader.batch_size)

    changed = replace(
        plan,
        task=PerSourceMetrics(inner=plan.task, names=names),
        callbacks=(*plan.callbacks, watch),
        summary=watch.summarise,
        finish=watch.write,
    )
    return changed.with_train_start_hook(begin)
