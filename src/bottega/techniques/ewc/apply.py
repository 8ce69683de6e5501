"""EWC over a sequence: at the first step of each source, the importance of weights for the previous one is measured."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from bottega.config.recipe import Recipe
from bottega.core.engine import Engine
from bottega.core.errors import UsageError
from bottega.core.types import Batch
from bottega.data.loading.loader import Loader
from bottega.data.order.sequential import Sequential
from bottega.tasks.workload import Workload
from bottega.techniques.continual.apply import require_sequence
from bottega.techniques.ewc.config import EwcOptions
from bottega.techniques.ewc.task import FISHER_PREFIX, Ewc, consolidate
from bottega.techniques.training_plan import TrainingPlan
from bottega.world import World


def apply(plan: TrainingPlan, options: EwcOptions, recipe: Recipe, workload: Workload) -> TrainingPlan:
    """Penalise changes of weights that were important to the earlier sources of a sequence."""
    require_sequence(plan, "ewc")
    if recipe.engine == "jax" and World.from_environment().size > 1:
        # Each process would measure other examples, but processes of JAX all compute the same program on one global batch.
        raise UsageError(
            "techniques: ewc with engine: jax needs a single process, which may use several devices; start one process, or use "
            "engine=torch"
        )
    task = Ewc(inner=plan.task, strength=options.strength, framework=recipe.engine)
    return replace(plan, task=task).with_train_start_hook(partial(_consolidate_between_sources, options=options))


def _consolidate_between_sources(engine: Engine, loader: Loader, *, resumed: bool, options: EwcOptions) -> None:
    """Consolidate before the first step of each source.

    The importance depends only on the step, the weights and the data, so a run resumed at such a step computes it again.
    """
    order = loader.order
    assert isinstance(order, Sequential), "the technique requires it"
    source_by_first_step = {
        step: index for index, step in enumerate(order.schedule.first_steps(loader.batch_size)) if index
    }
    names = [name.removeprefix(FISHER_PREFIX) for name in engine.task_state() if name.startswith(FISHER_PREFIX)]

    def consolidate_previous(step: int, batch: Batch) -> None:
        if step not in source_by_first_step:
            return
        sample_indices = order.first_samples(source_by_first_step[step] - 1, options.samples)
        numbers = range(engine.data_rank, len(sample_indices), engine.data_size)  # those of this rank
        first_epoch = np.zeros(1, np.int64)
        examples = ((i, loader.source.rows(sample_indices[i : i + 1], first_epoch)) for i in numbers)
        fisher = engine.fisher_diagonal(examples, count=len(sample_indices), names=names)
        parameters = dict(engine.model.named_parameters())
        engine.write_task_state(consolidate(engine.task_state(), parameters, fisher, decay=options.decay))

    engine.add_hook(consolidate_previous)
