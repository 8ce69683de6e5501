"""The task `multitask`: one model trained on several tasks."""

from __future__ import annotations

from pathlib import Path

from bottega.config.task_spec import TaskSpec
from bottega.tasks.classify.config import ClassifyRecipe
from bottega.tasks.multitask.config import MultitaskRecipe


def _build_example_input(recipe: MultitaskRecipe, processor: Path) -> str | None:
    from bottega.tasks.recipes import load_saved_recipe

    candidates = [
        name for name in recipe.data.parts if isinstance(load_saved_recipe(processor / f"{name}.yaml"), ClassifyRecipe)
    ]
    part = f"--part {candidates[0]} " if len(candidates) > 1 else ""
    return f'{part}"your text"' if candidates else None


SPEC = TaskSpec(
    name="multitask",
    recipe=MultitaskRecipe,
    open="bottega.tasks.multitask.workload:open_workload",
    reopen="bottega.tasks.multitask.workload:reopen_workload",
    allowed_in_multitask=False,
    example_input=_build_example_input,
    unsupported_verbs={"prepare": "task: the data of multitask cannot be prepared yet"},
    init_values={"data.parts": {"first": {"recipe": "first.yaml"}, "second": {"recipe": "second.yaml"}}},
)
