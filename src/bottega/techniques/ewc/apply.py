"""EWC over a sequence: at the first step of each next source, what mattered for the one before it is measured and held."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from bottega.config.recipe import Recipe
from bottega.core.engine import Engine
from bottega.core.types import Batch
from bottega.data.loading.loader import Loader
from bottega.data.order.in_turn import InTurn
from bottega.tasks.branch import Branch
from bottega.techniques.continual.apply import needs_sequence
from bottega.techniques.ewc.config import EwcOptions
from bottega.techniques.ewc.torch import FISHER, Ewc, consolidated
from bottega.techniques.lesson import Lesson


def apply(lesson: Lesson, options: EwcOptions, recipe: Recipe, branch: Branch) -> Lesson:
    needs_sequence(lesson, "ewc")
    task = Ewc(inner=lesson.task, strength=options.strength)
    return replace(lesson, task=task).beginning(partial(_follow, options=options))


def _follow(engine: Engine, loader: Loader, *, resumed: bool, options: EwcOptions) -> None:
    """A function of the step, the weights and the data, so that a checkpoint at a border finds the same again."""
    order = loader.order
    assert isinstance(order, InTurn), "the technique asks for it"
    firsts = {step: turn for turn, step in enumerate(order.turns(loader.batch_size)) if turn}
    names = [name.removeprefix(FISHER) for name in engine.task_state() if name.startswith(FISHER)]

    def before(step: int, batch: Batch) -> None:
        if step not in firsts:
            return
        numbers = order.examples(firsts[step] - 1, options.samples)
        mine = range(engine.data_rank, len(numbers), engine.data_size)
        examples = ((i, loader.source.rows(numbers[i : i + 1], np.zeros(1, np.int64))) for i in mine)
        fisher = engine.squared_gradients(examples, count=len(numbers), names=names)
        parameters = dict(engine.model.named_parameters())
        engine.write_task_state(consolidated(engine.task_state(), parameters, fisher, decay=options.decay))

    engine.add_hook(before)
