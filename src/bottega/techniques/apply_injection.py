"""Application of LoRA and adapters: the injected task, for training and for reloading a run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

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


def build_injected_task(task: Task, technique: Technique, *, workload_task: Task) -> InjectedTask:
    """Return `task` with layers injected into its model; `workload_task` is the workload's own task."""
    inject, options = TECHNIQUES[technique.name].inject, technique.options
    assert inject is not None, f"{technique.name} injects nothing"
    train = getattr(options, "train", None)
    train_options = {"train": train} if train is not None else {"random_modules": workload_task.new_modules()}
    injected_task: InjectedTask = resolve_reference(inject)(
        task, options, **train_options, start=getattr(options, "start", None)
    )
    return injected_task


def apply_injection(plan: TrainingPlan, options: Any, recipe: Recipe, workload: Workload, *, name: str) -> TrainingPlan:
    """Return the plan with layers injected into a frozen base model, whose hash is saved with the run."""
    task = build_injected_task(plan.task, Technique(name=name, options=options), workload_task=workload.task)
    meta_model = build_meta_model(task, recipe.seed)
    notes: tuple[str, ...] = ()
    if meta_model is not None:  # otherwise the built model is checked
        notes = _check_options(task, meta_model, recipe)
    if getattr(recipe.model, "from_", None) is None:
        notes = (
            *notes,
            f"{name}: model.from is null, so the frozen base model has random weights of seed {recipe.seed}",
        )

    def add_base_hash(plan: TrainingPlan, engine: Engine) -> TrainingPlan:
        late_notes = _check_options(task, engine.model, recipe) if meta_model is None else ()
        frozen_hashes = {**plan.frozen, BASE: task.hash_base(engine.model)}
        return replace(plan, frozen=frozen_hashes, notes=(*plan.notes, *late_notes))

    injected_plan = replace(plan, task=task, notes=(*plan.notes, *notes))
    return injected_plan.with_engine_built_hook(add_base_hash).with_train_start_hook(
        partial(_load_start_adapter, task=task)
    )


def _check_options(task: InjectedTask, model: Any, recipe: Recipe) -> tuple[str, ...]:
    """Raise if training.groups or training.freeze match only frozen parameters; return notes on the options."""
    task.check_patterns((group.pattern for group in recipe.training.groups), model, key="training.groups")
    freeze = recipe.training.freeze or ()
    if BACKBONE in freeze and not any(name == BACKBONE for name, _ in model.named_children()):
        # Without such a module, `backbone` is every layer but the last: it would freeze most of the injected layers.
        raise UsageError(f"training.freeze: remove {BACKBONE}, because {task.key} already freezes the base model")
    task.check_patterns(freeze, model, key="training.freeze")
    return tuple(task.notes(model))


def _load_start_adapter(engine: Engine, loader: Loader, *, resumed: bool, task: InjectedTask) -> None:
    """Load the adapter to start from, and restart the weight average there."""
    if not resumed and task.load_start(engine.model):
        engine.reset_weight_average()
