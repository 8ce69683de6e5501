"""What would run, before anything runs."""

from __future__ import annotations

import sys
from typing import Any

from bottega.schema.load import check_recipe, parse_overrides, to_yaml
from bottega.schema.recipe import BUILT_TASKS, Recipe


def check(words: list[str], *, show: bool) -> dict[str, Any]:
    """Validate recipes and overrides together; print the resolved recipe. All problems come in one error."""
    sources, overrides = parse_overrides(words)
    resolved = check_recipe(sources, overrides)
    tasks = list(resolved.task_candidates)
    if show:
        for note in resolved.notes:
            sys.stderr.write(f"bottega: {note}\n")
        sys.stdout.write(to_yaml(resolved.recipe))
        sys.stderr.write(
            f"bottega: {_story(resolved.recipe) if len(tasks) == 1 else 'valid for ' + ', '.join(tasks)}\n"
        )
    return {"valid": True, "tasks": tasks, "notes": list(resolved.notes), "recipe": resolved.recipe.plain()}


def _story(recipe: Recipe) -> str:
    """The run in a sentence."""
    t = recipe.training
    length = f"{t.max_steps} steps" if t.max_steps else f"{t.num_epochs} epochs" if t.num_epochs else "no length yet"
    batch = f"batches of {t.batch_size * (t.gradient_accumulation_steps or 1)}"
    rate = "a rate that a range test finds" if t.learning_rate == "auto" else f"{t.learning_rate:g}"
    how = f"{t.optimizer.name} at {rate}, {t.scheduler.name}"
    later = "" if recipe.task in BUILT_TASKS else f" ({recipe.task} cannot be trained yet)"
    return f"valid; {recipe.task}: {length}, {batch}, {how}, in {recipe.output_dir}/{recipe.run_name()}{later}"
