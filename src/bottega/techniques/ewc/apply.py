"""EWC over a sequence: at the first step of each next source, what mattered for the one before it is measured and held."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from bottega.config.recipe import Recipe
from bottega.config.techniques import EwcOptions
from bottega.core.types import Batch
from bottega.data.loading.loader import Loader
from bottega.data.order.in_turn import InTurn
from bottega.tasks.branch import Branch
from bottega.techniques.continual.apply import needs_sequence
from bottega.techniques.ewc.torch import FISHER, Ewc, consolidate
from bottega.techniques.lesson import Lesson

if TYPE_CHECKING:
    from bottega.engines.torch import TorchEngine


def apply(lesson: Lesson, options: EwcOptions, recipe: Recipe, branch: Branch) -> Lesson:
    needs_sequence(lesson, "ewc")
    task = Ewc(inner=lesson.task, strength=options.strength)
    return replace(lesson, task=task).beginning(lambda engine, loader: _follow(engine, loader, options))


def _follow(engine: TorchEngine, loader: Loader, options: EwcOptions) -> None:
    """A function of the step, the weights and the data, so that a checkpoint at a border finds the same again."""
    from bottega.engines.fisher import diagonal

    order, earlier = loader.order, engine.before_step
    assert isinstance(order, InTurn), "the technique asks for it"
    firsts = {step: turn for turn, step in enumerate(order.turns(loader.batch_size)) if turn}
    names = [name.removeprefix(FISHER) for name in engine.kept if name.startswith(FISHER)]

    def before(step: int, batch: Batch) -> None:
        if earlier is not None:
            earlier(step, batch)
        if step not in firsts:
            return
        numbers = order.examples(firsts[step] - 1, options.samples)
        mine = range(engine.data_rank, len(numbers), engine.data_size)
        examples = ((i, loader.source.rows(numbers[i : i + 1], np.zeros(1, np.int64))) for i in mine)
        found = diagonal(engine, examples, count=len(numbers), names=names)
        consolidate(engine.kept, dict(engine.model.named_parameters()), found, decay=options.decay)

    engine.before_step = before
