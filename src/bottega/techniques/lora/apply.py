"""LoRA: only low-rank changes of the model's layers learn, and only they are saved."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bottega.config.groups import BACKBONE
from bottega.config.recipe import Recipe
from bottega.config.techniques import AdapterOptions, LoraOptions
from bottega.config.together import injection
from bottega.core.errors import UsageError
from bottega.tasks.branch import Branch
from bottega.tasks.frozen import BASE
from bottega.techniques.injection import injected
from bottega.techniques.lesson import Lesson

if TYPE_CHECKING:
    from bottega.engines.torch import TorchEngine
    from bottega.techniques.inject import Injected

CODERS = ("image_vae", "image_tokens")
"""What others are built on is known by its whole export, and a base beside it would be a second thing to keep."""


def apply(lesson: Lesson, options: LoraOptions, recipe: Recipe, branch: Branch) -> Lesson:
    return adapted(lesson, options, recipe, branch, name="lora")


def adapted(
    lesson: Lesson, options: LoraOptions | AdapterOptions, recipe: Recipe, branch: Branch, *, name: str
) -> Lesson:
    """The same lesson over a base that stays. Who goes on with it, or opens it again, must find that very base."""
    if recipe.task in CODERS:
        raise UsageError(f"techniques: {name} is not for {recipe.task}; train it in full")
    injection(recipe)  # refuses two at once
    task = injected(lesson.task, options, of=branch.task)
    model = task.ahead(recipe.seed)
    task.check_named((group.pattern for group in recipe.training.groups), model, key="training.groups")
    freeze = recipe.training.freeze or ()
    if BACKBONE in freeze and not any(part == BACKBONE for part, _ in model.named_children()):
        # By layers it would leave what was put into the last block, which is not what anybody means.
        raise UsageError(f"training.freeze: {BACKBONE}: {task.key} keeps the base as it is already; leave it out")
    task.check_named(freeze, model, key="training.freeze")
    frozen = {**lesson.frozen, BASE: task.base(recipe.seed)}
    notes = (*lesson.notes, *task.notes(model))
    if getattr(recipe.model, "from_", None) is None:
        notes = (
            *notes,
            f"{name}: model.from is null, so the base is random weights of seed {recipe.seed}, and stays so",
        )
    changed = replace(lesson, task=task, frozen=frozen, notes=notes)
    return changed.beginning(lambda engine, loader: _begin(engine, task))


def _begin(engine: TorchEngine, task: Injected) -> None:
    """Averages follow weights from where these begin, and the engine was built before that."""
    if task.begin(engine.model):
        named = dict(engine.model.named_parameters())
        for name, average in engine.state().get("ema.safetensors", {}).items():
            average.copy_(named[name].detach())
