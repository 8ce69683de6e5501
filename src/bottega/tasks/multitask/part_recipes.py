"""The complete recipe of each part of a multitask run: its own recipe, with the trunk, the seed and the length of the whole run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bottega.config.recipe import Recipe
from bottega.core.errors import UsageError
from bottega.models.decoder.config import MLP_RATIO
from bottega.tasks import dependencies
from bottega.tasks.classify.config import ClassifyRecipe
from bottega.tasks.language.config import LanguageRecipe
from bottega.tasks.multitask.config import MultitaskRecipe
from bottega.tasks.recipes import check_recipe, load_recipe
from bottega.tasks.registry import TASKS


def build_part_recipe(recipe: MultitaskRecipe, name: str) -> Recipe:
    """Return the complete recipe of one part; errors name the part."""
    part = recipe.data.parts[name]
    common_settings = {"device": recipe.device, "seed": recipe.seed, "engine": recipe.engine, "name": None}
    try:
        _check_task(check_recipe([part.recipe], check_conflicts=False).task_candidates)
        own_recipe = check_recipe([part.recipe, part.settings], check_conflicts=False).recipe
        defaults: dict[str, Any] = {
            "model": _build_trunk_settings(recipe, own_recipe),
            "training": _build_length_settings(recipe),
        }
        if recipe.data.tokenizer is not None and reads_text(own_recipe):
            defaults["data"] = {"tokenizer": recipe.data.tokenizer.model_dump(exclude_none=True)}
        complete_recipe = load_recipe([part.recipe, defaults, part.settings, common_settings]).recipe
    except UsageError as error:
        raise UsageError("\n".join(f"data.parts.{name}: {line}" for line in str(error).splitlines())) from None
    _check_supported(name, complete_recipe)
    return complete_recipe


def _check_task(tasks: Sequence[str]) -> None:
    """Raise UsageError for a task that cannot be a part; its settings, checked later, would not fit either."""
    # Personalize, for example, trains soft prompts between two frozen models and has no trunk to share.
    allowed = [task for task, spec in TASKS.items() if spec.allowed_in_multitask]
    if not set(tasks) & set(allowed):
        raise UsageError(f"a part cannot be of task {tasks[0]}; it can be {', '.join(allowed)}")


def _build_length_settings(recipe: MultitaskRecipe) -> dict[str, Any]:
    """Return the length and batch size of the whole run as settings of a part."""
    training = recipe.training
    keys = ("max_steps", "num_epochs", "batch_size", "gradient_accumulation_steps")
    length = {key: value for key in keys if (value := getattr(training, key)) is not None}
    if recipe.data.online is not None and training.max_steps is None:
        return {"num_epochs": 1, **length}  # the whole run is one pass over a stream
    return length


def _build_trunk_settings(recipe: MultitaskRecipe, part: Recipe) -> dict[str, Any]:
    """Return the dimensions of the shared trunk under the keys of this part's model.

    A part that starts from pretrained weights keeps their dimensions.
    """
    model = recipe.model
    values = {key: getattr(model, key) for key in ("hidden_size", "num_layers", "num_heads", "dropout")}
    settings = {
        key: value for key, value in values.items() if value is not None and key in type(part.model).model_fields
    }
    if getattr(part.model, "kind", None) in ("cnn", "pretrained") or getattr(part.model, "from_", None) is not None:
        return {key: value for key, value in settings.items() if key == "dropout"}
    width, heads = model.hidden_size, model.num_heads
    if isinstance(part, LanguageRecipe) and part.model.kind == "ssm":
        return {key: value for key, value in settings.items() if key != "num_heads"}  # it has no attention
    if isinstance(part, LanguageRecipe) and width is not None and heads is not None:
        return {**settings, "num_kv_heads": heads, "head_size": width // heads, "intermediate_size": MLP_RATIO * width}
    return settings


def _check_supported(name: str, part: Recipe) -> None:
    """Raise UsageError for a key that a part cannot have."""
    needed_dependencies = dependencies.find_referenced_dependencies(part)
    for key, is_set in {
        "techniques": bool(part.techniques),
        "data.curriculum": part.data.curriculum is not None,
        "data.mixture: sequence": part.data.mixture == "sequence",
        "data.online": part.data.online is not None,
        f"needs ({', '.join(needed_dependencies)})": bool(needed_dependencies),
    }.items():
        if is_set:
            raise UsageError(f"data.parts.{name}: {key} cannot be combined with several tasks; remove it from the part")


def reads_text(part: Recipe) -> bool:
    """Whether the recipe of a part has a tokenizer that parts can share."""
    return isinstance(part, LanguageRecipe | ClassifyRecipe)


def get_tokenizer_rank(part: Recipe) -> int:
    """Return a sort key of parts: the tokenizer of the lowest one is used for the texts of all parts.

    Pretrained weights come first, since their tokenizer is fixed; then language models, whose tokenizer is reversible.
    """
    if getattr(part.model, "from_", None) is not None:
        return 0
    return 1 if isinstance(part, LanguageRecipe) else 2


def use_tokenizer(part: Any, folder: str) -> Any:
    """Return the recipe of a part with the tokenizer in `folder`."""
    tokenizer = part.data.tokenizer.model_copy(update={"kind": "pretrained", "path": folder, "vocab_size": None})
    return part.model_copy(update={"data": part.data.model_copy(update={"tokenizer": tokenizer})})


def read_saved_recipe(processor_folder: Path, name: str) -> Recipe | None:
    """Return the recipe of a part that was saved with the run, None if there is none."""
    path = processor_folder / f"{name}.yaml"
    return load_recipe([path]).recipe if path.is_file() else None
