"""What would run, before anything runs."""

from __future__ import annotations

from typing import Any

from bottega.core.errors import UsageError
from bottega.schema import needs
from bottega.schema.load import check_recipe, parse_overrides, to_yaml
from bottega.schema.recipe import BUILT_TASKS, Recipe
from bottega.schema.techniques import UNBUILT
from bottega.schema.together import absent
from bottega.terminal import print_notice, print_result


def check(words: list[str], *, show: bool) -> dict[str, Any]:
    """Validate recipes and overrides together; print the resolved recipe. All problems come in one error."""
    sources, overrides = parse_overrides(words)
    resolved = check_recipe(sources, overrides)
    tasks = list(resolved.task_candidates)
    if len(tasks) == 1 and (gone := absent(resolved.recipe)):
        raise UsageError("\n".join(gone))
    if len(tasks) == 1:
        needs.check(resolved.recipe)
    if show:
        for note in resolved.notes:
            print_notice(f"bottega: {note}")
        print_result(to_yaml(resolved.recipe), end="")
        print_notice(f"bottega: {_story(resolved.recipe) if len(tasks) == 1 else 'valid for ' + ', '.join(tasks)}")
        for line in _methods(resolved.recipe):
            print_notice(f"bottega: {line}")
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


def _methods(recipe: Recipe) -> list[str]:
    """What is added to plain training, a line each."""
    found = []
    for technique in recipe.techniques:
        options = technique.model_dump(mode="json", by_alias=True).get("options", {})
        said = ", ".join(f"{key} {_written(value)}" for key, value in options.items() if value is not None)
        later = "cannot be trained yet" if technique.name in UNBUILT else said
        found.append(f"techniques: {technique.name}" + (f" ({later})" if later else ""))
    if recipe.training.learning_rate == "auto":
        found.append(
            "training.learning_rate: auto, found by a range test before the first step, as bottega lr-find does"
        )
    found += beforehand(recipe)
    split = recipe.data.split
    if split is not None and split.folds is not None:
        found.append(
            f"data.split: fold {split.fold} of {split.folds} is held out; bottega crossval trains each of them"
        )
    return found


def beforehand(recipe: Recipe) -> list[str]:
    """What of a step could be done once beforehand, and what cannot."""
    prefixes = getattr(recipe.model, "num_prefix_tokens", None)
    if prefixes is None:
        return []
    if prefixes:
        return [
            f"model.num_prefix_tokens {prefixes}: every state of the language model depends on what is trained, so none "
            "can be computed beforehand; 0 runs the history without gradient"
        ]
    return ["model.num_prefix_tokens 0: no gradient passes through the history, which is read without keeping anything"]


def _written(value: Any) -> str:
    return (
        f"[{', '.join(map(str, value))}]"
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
