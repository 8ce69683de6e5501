"""The task `language`: causal language modelling."""

from __future__ import annotations

from typing import Any

from bottega.config.layers import FlatConfig
from bottega.config.task_spec import TaskSpec
from bottega.models.decoder.kinds import adapt_kv_heads
from bottega.tasks.language.config import LanguageRecipe
from bottega.tasks.weights import drop_dimensions


def prepare(recipe: LanguageRecipe, progress: Any) -> Any:
    """Prepare the tokens of a recipe's texts."""
    from bottega.tasks.base_model import resolve_tokenizer_spec
    from bottega.tasks.language.prepare import prepare_language

    return prepare_language(recipe.data, resolve_tokenizer_spec(recipe), progress=progress)


def adapt(base: FlatConfig, layer: FlatConfig) -> list[str]:
    """Drop or adapt the dimensions of `base` that conflict with those of `layer`; return notes on what changed."""
    drop_dimensions(base, layer, lambda values: values.get("task") == "language")
    return adapt_kv_heads(base, layer)


SPEC = TaskSpec(
    name="language",
    recipe=LanguageRecipe,
    open="bottega.tasks.language.workload:open_workload",
    reopen="bottega.tasks.language.workload:reopen_workload",
    prepare=prepare,
    preview="bottega.tasks.language.preview:TextPreview",
    files=("text", "embedded"),
    init_values={"model.size": "nano", "data.train.kind": "embedded"},
    rows_are_samples=False,
    loss_is_cross_entropy=True,
    adapt=adapt,
    jax_values={"model.kind": ("transformer",)},
)
