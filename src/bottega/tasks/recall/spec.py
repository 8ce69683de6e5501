"""The task `recall`: answer queries for facts that are outside the context."""

from __future__ import annotations

from bottega.config.task_spec import TaskSpec
from bottega.tasks.recall.config import LastingRecipe, RecallRecipe

NO_FILES = "task: the data of recall is generated during training, so there is nothing to prepare or to preview"

SPEC = TaskSpec(
    name="recall",
    recipe=RecallRecipe,
    inputs={"streams": RecallRecipe, "facts": LastingRecipe},
    open="bottega.tasks.recall.workload:open_workload",
    reopen="bottega.tasks.recall.workload:reopen_workload",
    unsupported_verbs={
        "prepare": NO_FILES,
        "generate": "a recall model does not generate; use bottega evaluate to measure its retrieval accuracy",
    },
    init_values={},
)
