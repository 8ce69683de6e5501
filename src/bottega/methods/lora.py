"""LoRA: only low-rank changes of the model's layers learn, and only they are saved."""

from __future__ import annotations

from dataclasses import replace

from bottega.branches.branch import Branch
from bottega.branches.frozen import BASE
from bottega.branches.start import injected, injection
from bottega.core.errors import UsageError
from bottega.methods.lesson import Lesson
from bottega.schema.recipe import Recipe
from bottega.schema.techniques import AdapterOptions, LoraOptions

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
    frozen = {**lesson.frozen, BASE: task.base(recipe.seed)}
    notes = lesson.notes
    if getattr(recipe.model, "from_", None) is None:
        notes = (
            *notes,
            f"{name}: model.from is null, so the base is random weights of seed {recipe.seed}, and stays so",
        )
    return replace(lesson, task=task, frozen=frozen, notes=notes)
