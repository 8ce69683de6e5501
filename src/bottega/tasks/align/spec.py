"""The task `align`."""

from __future__ import annotations

from typing import Any

from bottega.config.task_spec import TaskSpec
from bottega.tasks.align.config import AlignRecipe


def _prepare(recipe: AlignRecipe, progress: Any) -> Any:
    from bottega.data.prepare.media import prepare_media

    return prepare_media(recipe, progress=progress)


SPEC = TaskSpec(
    name="align",
    recipe=AlignRecipe,
    open="bottega.tasks.align.branch:prepare",
    reopen="bottega.tasks.align.branch:reopen",
    prepare=_prepare,
    refuses={
        "generate": "a CLIP does not generate; bottega train image model.condition=text model.text.from=RUN trains one that "
        "does, and reads with it"
    },
)
