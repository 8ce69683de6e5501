"""The parts of a recipe: other runs it is built on, each a whole recipe that by itself learns from the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bottega.core.errors import UsageError
from bottega.schema.load import check_recipe, load_recipe
from bottega.schema.recipe import Recipe

PREFIX = "needs."
PARTS = "parts"
# What a part says for itself: how it changes or orders what it learns from, and how it is loaded.
OWN = ("augmentation", "curriculum", "replay", "store", "workers", "prefetch", "pin_memory", "latents")


def part_recipe(recipe: Recipe, name: str) -> Recipe:
    """The whole recipe of one need that is trained: its own, over this recipe's data."""
    need = recipe.needs[name]
    assert need.recipe is not None, "a finished run has no recipe to resolve"
    schema = type(check_recipe([need.recipe, need.settings]).recipe.data)
    data = recipe.data.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude=set(OWN))
    same = {key: value for key, value in data.items() if key in schema.model_fields and value is not None}
    if "sources" in same:
        same.pop("train", None)
    settings: dict[str, Any] = {"output_dir": str(Path(recipe.output_dir) / PARTS), "device": recipe.device}
    try:
        return load_recipe([need.recipe, {"data": same} if not need.own_data else {}, need.settings, settings]).recipe
    except UsageError as error:
        raise UsageError(f"needs.{name}: {error}") from None


def referenced(recipe: Recipe) -> list[str]:
    """The needs that the model is built on, and so are trained before it."""
    values = [str(value) for value in recipe.model.model_dump().values()]
    return sorted({value.removeprefix(PREFIX) for value in values if value.startswith(PREFIX)})


def part_run(recipe: Recipe, name: str, *, beside: Path | None = None) -> Path:
    """The run of a need. `beside` is the folder of runs where this one now lies, if not where it was trained."""
    need = recipe.needs.get(name)
    if need is None:
        named = ", ".join(recipe.needs) or "none"
        raise UsageError(f"needs.{name} is named, and the recipe's needs are {named}")
    if need.run is not None:
        return Path(need.run).expanduser()
    part = part_recipe(recipe, name)
    return (Path(part.output_dir) if beside is None else beside / PARTS) / part.run_name()
