"""The task `align`."""

from __future__ import annotations

from bottega.config.task_spec import TaskSpec
from bottega.tasks.align.config import AlignRecipe

SPEC = TaskSpec(
    name="align",
    recipe=AlignRecipe,
    open="bottega.tasks.align.workload:open_workload",
    reopen="bottega.tasks.align.workload:reopen_workload",
    prepare="bottega.data.prepare.media:prepare_media",
    unsupported_verbs={
        "generate": "a CLIP does not generate; bottega train image model.condition=text model.text.from=RUN trains a "
        "generator that reads captions with it"
    },
)
