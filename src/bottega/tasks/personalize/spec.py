"""The task `personalize`: image generation adapted to a user's taste."""

from __future__ import annotations

from typing import Any

from bottega.config.task_spec import TaskSpec
from bottega.tasks.personalize.config import PersonalizeRecipe


def _prepare(recipe: PersonalizeRecipe, progress: Any) -> Any:
    from bottega.tasks.personalize.data.prepare import prepare_people

    return prepare_people(recipe.data, progress=progress)


SPEC = TaskSpec(
    name="personalize",
    recipe=PersonalizeRecipe,
    open="bottega.tasks.personalize.workload:open_workload",
    reopen="bottega.tasks.personalize.workload:reopen_workload",
    reuses_processor=True,
    allowed_in_multitask=False,
    prepare=_prepare,
    preview="bottega.tasks.personalize.data.preview:PeoplePreview",
    fields=frozenset(("history", "target")),
    init_values={
        "model.diffusion": "path/to/stable-diffusion",
        "model.language_model": "path/to/llama",
        "data.train.path": "data/train.json",
    },
)
