"""The task `recall`."""

from __future__ import annotations

from bottega.config.task_spec import TaskSpec
from bottega.tasks.recall.config import LastingRecipe, RecallRecipe

MADE_UP = "task: the data of recall is made up as it is needed, so there is nothing to prepare or look at"

SPEC = TaskSpec(
    name="recall",
    recipe=RecallRecipe,
    inputs={"streams": RecallRecipe, "facts": LastingRecipe},
    open="bottega.tasks.recall.workload:prepare",
    reopen="bottega.tasks.recall.workload:reopen",
    refuses={
        "prepare": MADE_UP,
        "generate": "a run of recall does not generate; bottega evaluate says how well it remembers",
    },
    init_values={},
)
