"""Techniques that put parts into a model that stays as it is (LoRA, adapters), in training and in reloading alike."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from bottega.config.conflicts import AUTOENCODER_TASKS, find_injection
from bottega.config.parameter_groups import BACKBONE
from bottega.config.recipe import Recipe
from bottega.config.technique_spec import TECHNIQUES
from bottega.config.techniques import Technique
from bottega.core.engine import Engine
from bottega.core.errors import UsageError
from bottega.core.model_spec import resolve_reference
from bottega.core.task import Task
from bottega.data.loading.loader import Loader
from bottega.models.build import build_meta_model
from bottega.tasks.frozen_models import BASE
from bottega.tasks.workload import Workload
from bottega.techniques.injected_layers import InjectedTask
from bottega.techniques.training_plan import TrainingPlan


def build_injected_task(task: Task, technique: Technique, *, of: Task) -> InjectedTask:
    """The task with parts put into its model. `of` is the branch's own."""
    inject, options = TECHNIQUES[technique.name].inject, technique.options
    assert inject is not None, f"{technique.name} puts nothing into a model"
    train = getattr(options, "train", None)
    learns = {"train": train} if train is not None else {"fresh": of.new_modules()}
    found: InjectedTask = resolve_reference(inject)(task, options, **learns, start=getattr(options, "start", None))
    return found


def apply_injection(plan: TrainingPlan, options: Any, recipe: Recipe, workload: Workload, *, name: str) -> TrainingPlan:
    """The same lesson over a base that stays. Who goes on with it, or opens it again, must find that very base."""
    if recipe.task in AUTOENCODER_TASKS:
        raise UsageError(f"techniques: {name} is not for {recipe.task}; train it in full")
    find_injection(recipe)  # refuses two at once
    task = build_injected_task(plan.task, Technique(name=name, options=options), of=workload.task)
    outline = build_meta_model(task, recipe.seed)
    notes: tuple[str, ...] = ()
    if outline is not None:  # else the built model is looked at
        notes = _check(task, outline, recipe)
    if getattr(recipe.model, "from_", None) is None:
        notes = (
            *notes,
            f"{name}: model.from is null, so the base is random weights of seed {recipe.seed}, and stays so",
        )

    def built(plan: TrainingPlan, engine: Engine) -> TrainingPlan:
        late = _check(task, engine.model, recipe) if outline is None else ()
        frozen = {**plan.frozen, BASE: task.hash_base(engine.model)}
        return replace(plan, frozen=frozen, notes=(*plan.notes, *late))

    changed = replace(plan, task=task, notes=(*plan.notes, *notes))
    return changed.with_engine_built_hook(built).with_train_start_hook(partial(_begin, task=task))


def _check(task: InjectedTask, model: Any, recipe: Recipe) -> tuple[str, ...]:
    """Refuse groups and parts that mean only what stays; return what somebody should know of the options on this model."""
    task.check_patterns((group.pattern for group in recipe.training.groups), model, key="training.groups")
    freeze = recipe.training.freeze or ()
    if BACKBONE in freeze and not any(part == BACKBONE for part, _ in model.named_children()):
        # By layers it would leave what was put into the last block, which is not what anybody means.
        raise UsageError(f"training.freeze: {BACKBONE}: {task.key} keeps the base as it is already; leave it out")
    task.check_patterns(freeze, model, key="training.freeze")
    return tuple(task.notes(model))


def _begin(engine: Engine, loader: Loader, *, resumed: bool, task: InjectedTask) -> None:
    """Averages follow weights from where these begin, and the engine was built before that."""
    if not resumed and task.load_start(engine.model):
        engine.reset_weight_average()
