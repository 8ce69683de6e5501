"""The task `routing`: classification of number rows by a mixture of experts."""

from __future__ import annotations

from typing import Any

from bottega.config.task_spec import TaskSpec
from bottega.tasks.routing.config import RoutingRecipe


def _prepare(recipe: RoutingRecipe, progress: Any) -> Any:
    from bottega.data.prepare.media import prepare_vectors

    return prepare_vectors(recipe.data, progress=progress)


SPEC = TaskSpec(
    name="routing",
    recipe=RoutingRecipe,
    open="bottega.tasks.routing.workload:open_workload",
    reopen="bottega.tasks.routing.workload:reopen_workload",
    prepare=_prepare,
    preview="bottega.data.numbers.preview:NumbersPreview",
    unsupported_verbs={
        "generate": "a classifier does not generate; bottega predict classifies new samples, bottega evaluate measures it"
    },
    example_input=lambda recipe, processor: recipe.data.train.path,
    has_labels=True,
    supports_label_smoothing=True,
    loss_is_cross_entropy=True,
    init_values={},
)
