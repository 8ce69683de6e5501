"""Techniques that put parts into a model that stays as it is (LoRA, adapters), in training and in reloading alike."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from bottega.config.groups import BACKBONE
from bottega.config.recipe import Recipe
from bottega.config.technique_spec import TECHNIQUES
from bottega.config.techniques import Technique
from bottega.config.together import CODERS, injection
from bottega.core.engine import Engine
from bottega.core.errors import UsageError
from bottega.core.model_spec import resolve
from bottega.core.task import Task
from bottega.data.loading.loader import Loader
from bottega.models.build import build_outline
from bottega.tasks.branch import Branch
from bottega.tasks.frozen import BASE
from bottega.techniques.inject import Injected
from bottega.techniques.lesson import Lesson


def injected(task: Task, technique: Technique, *, of: Task) -> Injected:
    """The task with parts put into its model. `of` is the branch's own."""
    inject, options = TECHNIQUES[technique.name].inject, technique.options
    assert inject is not None, f"{technique.name} puts nothing into a model"
    train = getattr(options, "train", None)
    learns = {"train": train} if train is not None else {"fresh": of.fresh_parts()}
    found: Injected = resolve(inject)(task, options, **learns, start=getattr(options, "start", None))
    return found


def adapted(lesson: Lesson, options: Any, recipe: Recipe, branch: Branch, *, name: str) -> Lesson:
    """The same lesson over a base that stays. Who goes on with it, or opens it again, must find that very base."""
    if recipe.task in CODERS:
        raise UsageError(f"techniques: {name} is not for {recipe.task}; train it in full")
    injection(recipe)  # refuses two at once
    task = injected(lesson.task, Technique(name=name, options=options), of=branch.task)
    outline = build_outline(task, recipe.seed)
    notes: tuple[str, ...] = ()
    if outline is not None:  # else the built model is looked at
        notes = _check(task, outline, recipe)
    if getattr(recipe.model, "from_", None) is None:
        notes = (
            *notes,
            f"{name}: model.from is null, so the base is random weights of seed {recipe.seed}, and stays so",
        )

    def built(lesson: Lesson, engine: Engine) -> Lesson:
        late = _check(task, engine.model, recipe) if outline is None else ()
        frozen = {**lesson.frozen, BASE: task.base_of(engine.model)}
        return replace(lesson, frozen=frozen, notes=(*lesson.notes, *late))

    changed = replace(lesson, task=task, notes=(*lesson.notes, *notes))
    return changed.building(built).beginning(partial(_begin, task=task))


def _check(task: Injected, model: Any, recipe: Recipe) -> tuple[str, ...]:
    """Refuse groups and parts that mean only what stays; return what somebody should know of the options on this model."""
    task.check_named((group.pattern for group in recipe.training.groups), model, key="training.groups")
    freeze = recipe.training.freeze or ()
    if BACKBONE in freeze and not any(part == BACKBONE for part, _ in model.named_children()):
        # By layers it would leave what was put into the last block, which is not what anybody means.
        raise UsageError(f"training.freeze: {BACKBONE}: {task.key} keeps the base as it is already; leave it out")
    task.check_named(freeze, model, key="training.freeze")
    return tuple(task.notes(model))


def _begin(engine: Engine, loader: Loader, *, resumed: bool, task: Injected) -> None:
    """Averages follow weights from where these begin, and the engine was built before that."""
    if not resumed and task.read_start(engine.model):
        engine.restart_average()
