"""Dependencies of a recipe (`needs`): other runs that it is built on, each with a recipe over the same data."""

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

REFERENCE_PREFIX = "needs."
DEPENDENCIES_FOLDER = "parts"
# Data keys that a dependency does not inherit: how samples are changed, ordered and loaded.
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
# Keys that are inherited even if they are null: a dependency with its own split or limit would train on held-out samples.
INHERITED_NULLS = ("split", "limit")
RESERVED_KEYS = ("name", "output_dir")


def build_dependency_recipe(recipe: Recipe, name: str) -> Recipe:
    """Return the complete recipe of one dependency that is trained: its own settings over this recipe's data.

    Defaults are inherited as well: the recipe.yaml of a run states all of them, and must give the same dependency.
    """
    dependency = recipe.needs[name]
    assert dependency.recipe is not None, "a finished run has no recipe to resolve"
    flat_settings = apply_aliases(flatten_layer(dependency.settings, file="settings", lines={})).entries
    for key in RESERVED_KEYS:
        if key in flat_settings:
            raise UsageError(f"needs.{name}.settings: {key} cannot be set: it is derived from the settings; remove it")
    fixed_settings: dict[str, Any] = {
        "output_dir": str(get_dependencies_folder(Path(recipe.output_dir))),
        "device": recipe.device,
        "name": None,
        "logging.report": False,
    }
    try:
        schema = type(check_recipe([dependency.recipe, dependency.settings], check_conflicts=False).recipe.data)
        data = recipe.data.model_dump(mode="json", by_alias=True, exclude=set(OWN_DATA_KEYS))
        inherited = {
            key: value
            for key, value in data.items()
            if key in schema.model_fields and (value is not None or key in INHERITED_NULLS)
        }
        if "sources" in inherited:
            inherited.pop("train", None)
        shared = {"data": inherited} if not dependency.own_data else {}
        return load_recipe([dependency.recipe, shared, dependency.settings, fixed_settings]).recipe
    except UsageError as error:
        raise UsageError(f"needs.{name}: {error}") from None


def get_dependencies_folder(runs: Path) -> Path:
    """Return the folder of the dependencies of the runs in `runs`; dependencies of dependencies share it."""
    return runs if runs.name == DEPENDENCIES_FOLDER else runs / DEPENDENCIES_FOLDER


def find_referenced_dependencies(recipe: Recipe) -> list[str]:
    """Return the names of dependencies that the model or a technique refers to: they are trained first."""
    values = [value for section in (recipe.model, *recipe.techniques) for value in _iterate_strings(section)]
    return sorted({value.removeprefix(REFERENCE_PREFIX) for value in values if value.startswith(REFERENCE_PREFIX)})


def check_dependencies(recipe: Recipe, chain: tuple[str, ...] = ()) -> None:
    """Raise UsageError if a dependency cannot be resolved or dependencies form a cycle, before any is trained."""
    chain, referenced = chain or (recipe.run_name(),), find_referenced_dependencies(recipe)
    for name in sorted({*recipe.needs, *referenced}):
        if _get_dependency(recipe, name).recipe is None:
            continue
        dependency_recipe = build_dependency_recipe(recipe, name)
        if name in referenced:
            extended_chain = (*chain, dependency_recipe.run_name())
            if extended_chain[-1] in chain:
                raise UsageError(f"needs.{name}: the dependencies form a cycle: {' -> '.join(extended_chain)}")
            check_dependencies(dependency_recipe, extended_chain)


def find_dependency_run(recipe: Recipe, name: str, *, runs_folder: Path | None = None) -> Path:
    """Return the run directory of a dependency; `runs_folder` holds this run, if it has moved."""
    dependency = _get_dependency(recipe, name)
    if dependency.run is not None:
        return Path(dependency.run).expanduser()
    dependency_recipe = build_dependency_recipe(recipe, name)
    runs = Path(dependency_recipe.output_dir) if runs_folder is None else get_dependencies_folder(runs_folder)
    return runs / dependency_recipe.run_name()


def resolve_reference(recipe: Recipe, value: str, *, runs_folder: Path | None = None) -> str:
    """Return the run directory of a `needs.NAME` value; other values unchanged."""
    return (
        str(find_dependency_run(recipe, value.removeprefix(REFERENCE_PREFIX), runs_folder=runs_folder))
        if value.startswith(REFERENCE_PREFIX)
        else value
    )


def resolve_model_reference(
    recipe: Recipe,
    name: str,
    *,
    key: str,
    runs_folder: Path | None = None,
    required_file: str | None = CONFIG,
    find: Callable[..., ModelFolder] = resolve_model,
    **options: Any,
) -> ModelFolder:
    """Return the model folder that a recipe names: the export of a dependency, or what `find` returns for the name."""
    if not name.startswith(REFERENCE_PREFIX):
        return find(name, key=key, required_file=required_file, **options)
    run = find_dependency_run(recipe, name.removeprefix(REFERENCE_PREFIX), runs_folder=runs_folder)
    if not is_run(run) and not (run / FINAL / (required_file or CONFIG)).is_file():
        raise untrained_error(recipe, key, name, run)
    return resolve_export(run, key=key, required_file=required_file, origin="dependency")


def resolve_references(recipe: Recipe) -> Recipe:
    """Return the recipe with each `needs.NAME` replaced by the run directory of that dependency."""
    if not find_referenced_dependencies(recipe):
        return recipe
    techniques = tuple(_replace_references(recipe, technique) for technique in recipe.techniques)
    return recipe.model_copy(update={"model": _replace_references(recipe, recipe.model), "techniques": techniques})


def untrained_error(recipe: Recipe, key: str, value: str, run: Path) -> UsageError:
    """Return the error for a dependency that has not been trained yet."""
    # For a recipe file, `origin` is its name without the path, which is not enough for a command.
    is_bundled = recipe.origin in bundled_recipes.list_recipe_names()
    arguments = f"{recipe.origin}, with the same settings" if is_bundled else "with the same recipe and settings"
    return UsageError(f"{key}: {value} is not trained yet ({run}); bottega train {arguments} trains it first")


def _get_dependency(recipe: Recipe, name: str) -> Dependency:
    dependency = recipe.needs.get(name)
    if dependency is None:
        defined = ", ".join(recipe.needs) or "none"
        raise UsageError(f"needs.{name} is not defined; the recipe's needs are: {defined}")
    return dependency


def _iterate_strings(section: Section) -> Iterator[str]:
    for field in type(section).model_fields:
        value = getattr(section, field)
        if isinstance(value, Section):
            yield from _iterate_strings(value)
        elif isinstance(value, str):
            yield value


def _replace_references(recipe: Recipe, section: Section) -> Section:
    changes: dict[str, Any] = {}
    for field in type(section).model_fields:
        value = getattr(section, field)
        if isinstance(value, Section):
            changes[field] = _replace_references(recipe, value)
        elif isinstance(value, str):
            changes[field] = resolve_reference(recipe, value)
    return section.model_copy(update=changes)
