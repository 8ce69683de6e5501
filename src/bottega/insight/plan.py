"""What would run, before anything runs."""

from __future__ import annotations

import sys
from typing import Any

from bottega.schema.load import check_recipe, parse_overrides, to_yaml


def check(words: list[str], *, show: bool) -> dict[str, Any]:
    """Validate recipes and overrides together; print the resolved recipe. All problems come in one error."""
    sources, overrides = parse_overrides(words)
    resolved = check_recipe(sources, overrides)
    tasks = list(resolved.task_candidates)
    if show:
        for note in resolved.notes:
            sys.stderr.write(f"bottega: {note}\n")
        sys.stdout.write(to_yaml(resolved.recipe))
        sys.stderr.write(f"bottega: valid for {', '.join(tasks)}\n")
    return {"valid": True, "tasks": tasks, "notes": list(resolved.notes), "recipe": resolved.recipe.plain()}
