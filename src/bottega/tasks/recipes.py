"""The recipe loader with the registry of tasks handed in: what everything above the tasks calls."""

from __future__ import annotations

from functools import partial

from bottega.config import describe, flags, importers, load
from bottega.tasks.registry import TASKS

load_recipe = partial(load.load_recipe, TASKS)
load_saved_recipe = partial(load.load_saved_recipe, TASKS)
check_recipe = partial(load.check_recipe, TASKS)
bundled_recipes = partial(load.bundled_recipes, TASKS)
parse_overrides = partial(flags.parse_overrides, TASKS)
json_schema = partial(describe.json_schema, TASKS)
commented_recipe = partial(describe.commented_recipe, TASKS)
import_file = partial(importers.import_file, TASKS)
