"""Settings of a recipe that its engine does not have, found before dependencies are trained and data is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from bottega.config.recipe import Recipe
from bottega.config.technique_spec import TECHNIQUES
from bottega.core.errors import BottegaError, UsageError
from bottega.tasks.registry import TASKS, find_spec


def find_engine_problems(recipe: Recipe) -> list[BottegaError]:
    """Return a problem for each setting without a form in JAX, with those that have one."""
    if recipe.engine != "jax":
        return []
    spec = find_spec(recipe)
    if spec.jax_values is None:
        available = ", ".join(other.name for other in TASKS.values() if other.jax_values is not None)
        return [
            UsageError(
                f"engine: jax has no form of the task {recipe.task}; it has {available}; use engine=torch for this task"
            )
        ]
    problems = [*_find_value_problems(recipe, spec.jax_values), *_find_technique_problems(recipe)]
    for name, dependency in recipe.needs.items():
        if dependency.settings.get("engine", "torch") != "torch":
            problems.append(f"needs.{name}.settings.engine: dependencies are trained by torch; remove it")
    return [UsageError(text) for text in problems]


def _find_value_problems(recipe: Recipe, allowed: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    for key, values in allowed.items():
        value: Any = recipe
        allowed_by_schema: tuple[Any, ...] = ()
        for name in key.split("."):
            field = type(value).model_fields.get(name) if isinstance(value, BaseModel) else None
            allowed_by_schema = get_args(field.annotation) if field is not None else ()
            value = getattr(value, name, values[0])
        if value not in values:
            # A schema of one medium has some of the values of a task only.
            offered = [other for other in values if not allowed_by_schema or other in allowed_by_schema]
            yield f"{key}: engine: jax has no {_join([value])}; it has {_join(offered)}; use one of these, or engine=torch"


def _find_technique_problems(recipe: Recipe) -> Iterator[str]:
    available = [name for name, spec in TECHNIQUES.items() if spec.jax_values is not None]
    for technique in recipe.techniques:
        allowed = TECHNIQUES[technique.name].jax_values
        if allowed is None:
            yield f"techniques: engine: jax has no {technique.name}; it has {_join(available)}; use engine=torch"
            continue
        for option, values in allowed.items():
            value = getattr(technique.options, option, values[0])
            if value not in values:
                yield (
                    f"techniques.{technique.name}.{option}: engine: jax has no {value}; it has {_join(values)}; use engine=torch"
                )


def _join(values: Any) -> str:
    return ", ".join(
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value) for value in values
    )
