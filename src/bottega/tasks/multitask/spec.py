"""The task `multitask`."""

from __future__ import annotations

from bottega.config.task_spec import TaskSpec
from bottega.tasks.multitask.config import MultitaskRecipe

SPEC = TaskSpec(
    name="multitask",
    recipe=MultitaskRecipe,
    open="bottega.tasks.multitask.branch:prepare",
    reopen="bottega.tasks.multitask.branch:reopen",
    combines=False,
    refuses={"prepare": "the data of multitask cannot be prepared yet"},
    starts={"data.parts": {"first": {"recipe": "first.yaml"}, "second": {"recipe": "second.yaml"}}},
)
