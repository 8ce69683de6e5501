"""The task `multitask`: one model trained on several tasks."""

from __future__ import annotations

from pathlib import Path

from bottega.config.task_spec import TaskSpec
from bottega.tasks.classify.config import ClassifyRecipe
from bottega.tasks.multitask.config import MultitaskRecipe


def _asks(recipe: MultitaskRecipe, processor: Path) -> str | None:
    from bottega.tasks.recipes import load_saved_recipe

    able = [n for n in recipe.data.parts if isinstance(load_saved_recipe(processor / f"{n}.yaml"), ClassifyRecipe)]
    part = f"--part {able[0]} " if len(able) > 1 else ""
    return f'{part}"your text"' if able else None


SPEC = TaskSpec(
    name="multitask",
    recipe=MultitaskRecipe,
    open="bottega.tasks.multitask.workload:prepare",
    reopen="bottega.tasks.multitask.workload:reopen",
    combines=False,
    asks=_asks,
    refuses={"prepare": "task: the data of multitask cannot be prepared yet"},
    init_values={"data.parts": {"first": {"recipe": "first.yaml"}, "second": {"recipe": "second.yaml"}}},
)
