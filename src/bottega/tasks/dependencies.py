"""The parts of a recipe: other runs it is built on, each a whole recipe that by itself learns from the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bottega.config import bundled_recipes
from bottega.config.aliases import apply_aliases
from bottega.config.layers import flatten_layer
from bottega.config.recipe import Dependency, Recipe
from bottega.config.section import Section
from bottega.core.errors import UsageError
from bottega.core.rundir import is_run
from bottega.models.folders.resolve import CONFIG, FINAL, ModelFolder, resolve_export, resolve_model
from bottega.tasks.recipes import check_recipe, load_recipe

PREFIX = "needs."
DEPENDENCIES_FOLDER = "parts"
# What a part says for itself: how it changes or orders what it learns from, and how it is loaded.
OWN_DATA_KEYS = (
    "input",
    "augmentation",
    "curriculum",
    "replay",
    "online",
    "store",
    "workers",
    "prefetch",
    "pin_memory",
    "latents",
)
# Here null is an answer too: a part with a split or limit of its own would learn from what is held out.
INHERITED_NULLS = ("split", "limit")
RESERVED_KEYS = ("name", "output_dir")


def dependency_recipe(recipe: Recipe, name: str) -> Recipe:
    """The whole recipe of one need that is trained: its own, over this recipe's data.

    Defaults are passed on as well: they are this recipe's data as much as what was said, and the recipe.yaml of a run,
    which says everything, must give the same part.
    """
    need = recipe.needs[name]
    assert need.recipe is not None, "a finished run has no recipe to resolve"
    said = apply_aliases(flatten_layer(need.settings, file="settings", lines={})).entries
    for key in RESERVED_KEYS:
        if key in said:
            raise UsageError(f"needs.{name}.settings: {key}: a part's name is a hash of what decides it; leave it out")
    settings: dict[str, Any] = {
        "output_dir": str(dependencies_folder(Path(recipe.output_dir))),
        "device": recipe.device,
    }
    try:
        schema = type(check_recipe([need.recipe, need.settings], check_conflicts=False).recipe.data)
        data = recipe.data.model_dump(mode="json", by_alias=True, exclude=set(OWN_DATA_KEYS))
        same = {k: v for k, v in data.items() if k in schema.model_fields and (v is not None or k in INHERITED_NULLS)}
        if "sources" in same:
            same.pop("train", None)
        given = {"data": same} if not need.own_data else {}
        return load_recipe([need.recipe, given, need.settings, {**settings, "name": None}]).recipe
    except UsageError as error:
        raise UsageError(f"needs.{name}: {error}") from None


def dependencies_folder(runs: Path) -> Path:
    """Where the parts of runs in a folder lie. Those of parts lie beside them: two may be built on the same one."""
    return runs if runs.name == DEPENDENCIES_FOLDER else runs / DEPENDENCIES_FOLDER


def referenced_dependencies(recipe: Recipe) -> list[str]:
    """The needs that the model is built on or learns from, and so are trained before it."""
    said = [value for block in (recipe.model, *recipe.techniques) for value in _texts(block)]
    return sorted({value.removeprefix(PREFIX) for value in said if value.startswith(PREFIX)})


def check_dependencies(recipe: Recipe, chain: tuple[str, ...] = ()) -> None:
    """What can be known of all parts before the first is trained: that they can be resolved, and come to an end."""
    chain, built_on = chain or (recipe.run_name(),), referenced_dependencies(recipe)
    for name in sorted({*recipe.needs, *built_on}):
        if _need(recipe, name).recipe is None:
            continue
        part = dependency_recipe(recipe, name)
        if name in built_on:
            longer = (*chain, part.run_name())
            if longer[-1] in chain:
                raise UsageError(f"needs.{name}: the parts go round in a circle: {' -> '.join(longer)}")
            check_dependencies(part, longer)


def dependency_run(recipe: Recipe, name: str, *, beside: Path | None = None) -> Path:
    """The run of a need. `beside` is the folder of runs where this one now lies, if not where it was trained."""
    need = _need(recipe, name)
    if need.run is not None:
        return Path(need.run).expanduser()
    part = dependency_recipe(recipe, name)
    return (Path(part.output_dir) if beside is None else dependencies_folder(beside)) / part.run_name()


def resolve_reference(recipe: Recipe, value: str, *, beside: Path | None = None) -> str:
    """A value of the recipe as it is, or the folder of the run that it names as a part."""
    return str(dependency_run(recipe, value.removeprefix(PREFIX), beside=beside)) if value.startswith(PREFIX) else value


def resolve_model_reference(
    recipe: Recipe,
    name: str,
    *,
    key: str,
    beside: Path | None = None,
    required_file: str | None = CONFIG,
    find: Callable[..., ModelFolder] = resolve_model,
    **options: Any,
) -> ModelFolder:
    """The folder of the model that a recipe names: what a part of it has exported, or what `find` makes of the name."""
    if not name.startswith(PREFIX):
        return find(name, key=key, required_file=required_file, **options)
    run = dependency_run(recipe, name.removeprefix(PREFIX), beside=beside)
    if not is_run(run) and not (run / FINAL / (required_file or CONFIG)).is_file():
        raise untrained_error(recipe, key, name, run)
    return resolve_export(run, key=key, required_file=required_file, origin="part")


def resolve_references(recipe: Recipe) -> Recipe:
    """The recipe with the runs of its parts in place of their names, for whoever only knows folders."""
    if not referenced_dependencies(recipe):
        return recipe
    techniques = tuple(_placed(recipe, technique) for technique in recipe.techniques)
    return recipe.model_copy(update={"model": _placed(recipe, recipe.model), "techniques": techniques})


def untrained_error(recipe: Recipe, key: str, value: str, run: Path) -> UsageError:
    """What to say to somebody who comes before the part."""
    # Of a file the recipe knows the name alone, which is no path to it.
    known = recipe.origin in bundled_recipes.list_recipe_names()
    same = f"{recipe.origin}, with the same settings" if known else "with the same recipe and settings"
    return UsageError(f"{key}: {value} is not trained yet ({run}); bottega train {same} as here does that first")


def _need(recipe: Recipe, name: str) -> Dependency:
    need = recipe.needs.get(name)
    if need is None:
        named = ", ".join(recipe.needs) or "none"
        raise UsageError(f"needs.{name} is named, and the recipe's needs are {named}")
    return need


def _texts(block: Section) -> Iterator[str]:
    for field in type(block).model_fields:
        value = getattr(block, field)
        if isinstance(value, Section):
            yield from _texts(value)
        elif isinstance(value, str):
            yield value


def _placed(recipe: Recipe, block: Section) -> Section:
    changes: dict[str, Any] = {}
    for field in type(block).model_fields:
        value = getattr(block, field)
        if isinstance(value, Section):
            changes[field] = _placed(recipe, value)
        elif isinstance(value, str):
            changes[field] = resolve_reference(recipe, value)
    return block.model_copy(update=changes)
