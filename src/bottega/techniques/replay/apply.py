"""Replay over a sequence: a fraction of each batch comes from earlier sources."""

from __future__ import annotations

from dataclasses import replace

from bottega.config.recipe import Recipe
from bottega.tasks.workload import Workload
from bottega.techniques.continual.apply import require_sequence
from bottega.techniques.replay.config import ReplayOptions
from bottega.techniques.training_plan import TrainingPlan


def apply(plan: TrainingPlan, options: ReplayOptions, recipe: Recipe, workload: Workload) -> TrainingPlan:
    """Mix samples of earlier sources, from a memory of fixed size, into each later one."""
    order = require_sequence(plan, "replay")
    return replace(plan, order=replace(order, replay_fraction=options.share, memory_size=options.memory))
