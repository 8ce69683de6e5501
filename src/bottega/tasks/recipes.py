"""The recipe loader bound to the registries of tasks and techniques; everything above `config` calls it here."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from bottega.config import flags, importers, load, schema
from bottega.config.recipe import Recipe
from bottega.config.technique_spec import TECHNIQUES
from bottega.core.errors import UsageError, first_line
from bottega.tasks.registry import TASKS
from bottega.techniques.registry import find_techniques as find_techniques

TECHNIQUES.update(find_techniques())

load_recipe = partial(load.load_recipe, TASKS)
check_recipe = partial(load.check_recipe, TASKS)
list_bundled_recipes = partial(load.list_bundled_recipes, TASKS)
parse_overrides = partial(flags.parse_overrides, TASKS)
build_json_schema = partial(schema.build_json_schema, TASKS)
render_recipe_template = partial(schema.render_recipe_template, TASKS)
import_file = partial(importers.import_file, TASKS)


def load_saved_recipe(path: Path) -> Recipe:
    """Load the recipe.yaml of a run; if its task is unknown, the error names the plugin that defines it."""
    try:
        return load.load_saved_recipe(TASKS, path)
    except UsageError as error:
        from bottega.tasks import plugins

        hint = plugins.describe_missing_plugin(path.parent)
        if hint is None:
            raise
        if plugins.is_plugin_loaded(path.parent):
            raise UsageError(f"{path} does not fit the present version of its plugin: {first_line(error)}") from None
        raise UsageError(f"{path.parent}: {hint}") from None
