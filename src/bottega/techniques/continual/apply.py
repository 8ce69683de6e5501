"""A sequence of sources as a lesson: each is measured by itself, and what of it is forgotten is written down."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bottega.config.data import source_names
from bottega.config.recipe import Recipe
from bottega.core.engine import Engine
from bottega.core.errors import UsageError
from bottega.core.loop import Goal
from bottega.data.loading.loader import Loader
from bottega.data.order.in_turn import InTurn
from bottega.techniques.continual.by_source import BySource
from bottega.techniques.continual.forgetting import Forgetting
from bottega.techniques.lesson import Lesson


def needs_sequence(lesson: Lesson, technique: str) -> InTurn:
    if not isinstance(lesson.order, InTurn):
        raise UsageError(
            f"techniques: {technique} is about sources that come one after the other; say data.mixture: sequence, with two "
            "data.sources or more"
        )
    return lesson.order


def watched(lesson: Lesson, recipe: Recipe) -> Lesson:
    """The lesson of a sequence, once all techniques have had their say."""
    names = tuple(source_names(recipe.data.sources or ()))
    if lesson.validation is None:
        said = "no data.validation, so that nothing measures what is forgotten; give it a share such as {split: 0.1}"
        return replace(lesson, notes=(*lesson.notes, said))
    first = np.zeros(1, np.int64)
    if "source" not in lesson.validation.rows(first, first):
        said = (
            "data.validation is a file of its own and no source says its labels, so that it is not told which source a sample "
            "measures, and there is no forgetting matrix"
        )
        return replace(lesson, notes=(*lesson.notes, said))
    watch = Forgetting(names, Goal(recipe.evaluation.metric, recipe.evaluation.maximise))

    def begin(engine: Engine, loader: Loader, *, resumed: bool) -> None:
        assert isinstance(loader.order, InTurn), "data.mixture is sequence"
        watch.firsts = loader.order.turns(loader.batch_size)

    changed = replace(
        lesson,
        task=BySource(inner=lesson.task, names=names),
        callbacks=(*lesson.callbacks, watch),
        summary=watch.summarise,
        finish=watch.write,
    )
    return changed.beginning(begin)
