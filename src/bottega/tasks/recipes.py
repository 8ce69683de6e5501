"""The recipe loader with the registries of tasks and techniques handed in: what everything above config calls."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from bottega.config import describe, flags, importers, load
from bottega.config.recipe import Recipe
from bottega.config.technique_spec import TECHNIQUES
from bottega.core.errors import UsageError, first_line
from bottega.tasks.registry import TASKS
from bottega.techniques.registry import find as find_techniques

TECHNIQUES.update(find_techniques())

load_recipe = partial(load.load_recipe, TASKS)
check_recipe = partial(load.check_recipe, TASKS)
bundled_recipes = partial(load.bundled_recipes, TASKS)
parse_overrides = partial(flags.parse_overrides, TASKS)
json_schema = partial(describe.json_schema, TASKS)
commented_recipe = partial(describe.commented_recipe, TASKS)
import_file = partial(importers.import_file, TASKS)


def load_saved_recipe(path: Path) -> Recipe:
    """The recipe.yaml of a run, whose task may have come from a plugin."""
    try:
        return load.load_saved_recipe(TASKS, path)
    except UsageError as error:
        from bottega.tasks import plugins

        asked = plugins.request(path.parent)
        if asked is None:
            raise
        if plugins.is_loaded(path.parent):
            raise UsageError(f"{path} does not fit the plugin as it is now: {first_line(error)}") from None
        raise UsageError(f"{path.parent}: {asked}") from None
