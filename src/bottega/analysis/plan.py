"""`bottega plan`: check a recipe as `train` would, and print the resolved recipe."""

from __future__ import annotations

import os
from typing import Any

from bottega.callbacks.console import Console
from bottega.config.load import ResolvedRecipe, get_global_batch_size, to_yaml
from bottega.config.recipe import Recipe
from bottega.core.errors import BottegaError, DataError
from bottega.redaction import redact_values
from bottega.run.checks import (
    find_data_problems,
    find_directory_problems,
    find_disk_problems,
    find_model_problems,
    find_problems,
    find_size_problems,
    list_adjusted_settings,
    list_unused_settings,
    load_checked_recipe,
    parse_words,
    raise_all,
)
from bottega.run.compose import build_training_plan, prepare_workload
from bottega.run.train import is_exported, prepare_data
from bottega.tasks import dependencies
from bottega.tasks.personalize.config import PersonalizeRecipe
from bottega.tasks.recipes import check_recipe
from bottega.tasks.registry import find_spec
from bottega.terminal import print_notice, print_result
from bottega.world import World


def plan_command(words: list[str], *, show: bool) -> dict[str, Any]:
    """Find every problem that `train` would, in one error with its exit code; else print the resolved recipe.

    A file that fits several tasks is a partial recipe, and is only checked against their schemas.
    """
    sources, overrides = parse_words(words)
    return plan_recipe(sources, overrides, show=show)


def plan_recipe(sources: list[Any], overrides: Any = (), *, show: bool) -> dict[str, Any]:
    """Check recipes given by name, file or dict; with `show`, print the result."""
    resolved = _resolve_recipe(sources, overrides)
    tasks = list(resolved.task_candidates)
    notes = list(resolved.notes)
    if len(tasks) == 1:
        raise_all([*find_problems(resolved.recipe), *find_directory_problems(resolved.recipe)])
        notes += list_unused_settings(resolved.recipe)
        notes += _check_data(resolved.recipe, quiet=not show)
    if show:
        for note in notes:
            print_notice(f"bottega: {note}")
        print_result(to_yaml(resolved.recipe), end="", is_data=True)
        print_notice(
            f"bottega: {_summarise_run(resolved.recipe) if len(tasks) == 1 else 'valid for ' + ', '.join(tasks)}"
        )
        for line in _list_additions(resolved.recipe):
            print_notice(f"bottega: {line}")
    return {"valid": True, "tasks": tasks, "notes": notes, "recipe": redact_values(resolved.recipe.to_plain_dict())}


def _resolve_recipe(sources: list[Any], overrides: Any) -> ResolvedRecipe:
    try:
        partial_recipe = check_recipe(sources, overrides)
    except BottegaError:
        partial_recipe = None
    return (
        partial_recipe
        if partial_recipe is not None and len(partial_recipe.task_candidates) > 1
        else load_checked_recipe(sources, overrides)
    )


def _check_data(recipe: Recipe, *, quiet: bool) -> list[str]:
    """Prepare the data as `train` would (which then reads it from the cache), and check the recipe against it.

    Return notes on what cannot be checked before something is trained or downloaded.
    """
    untrained_dependencies = [
        f"needs.{name}"
        for name in dependencies.find_referenced_dependencies(recipe)
        if not is_exported(dependencies.find_dependency_run(recipe, name))
    ]
    base = getattr(recipe.model, "from_", None)
    if (
        base is not None
        and not base.startswith(dependencies.REFERENCE_PREFIX)
        and not os.path.isdir(os.path.expanduser(base))
    ):
        return [f"model.from: {base} is not downloaded yet; what depends on it is checked when train downloads it"]
    if untrained_dependencies or isinstance(recipe, PersonalizeRecipe) or getattr(recipe.data, "latents", False):
        prepared = prepare_data(recipe, quiet=quiet)
        if prepared is not None:
            _check_rows(recipe, sum(prepared.tables[table]["rows"] for table in prepared.training_tables))
        return (
            [f"{', '.join(untrained_dependencies)}: to be trained first; what depends on it is not checked"]
            if untrained_dependencies
            else []
        )
    resolved = dependencies.resolve_references(recipe)
    workload = prepare_workload(resolved, Console(unit="samples", quiet=quiet))
    raise_all(find_size_problems(recipe, workload.task) or find_disk_problems(recipe, workload.task))
    plan = build_training_plan(resolved, workload)
    raise_all([*find_data_problems(recipe, plan), *find_model_problems(recipe, plan)])
    return [*plan.notes, *list_adjusted_settings(recipe, plan)]


def _check_rows(recipe: Recipe, num_rows: int) -> None:
    batch_size = get_global_batch_size(recipe, World.from_environment().data_size)
    if num_rows < batch_size and find_spec(recipe).rows_are_samples:
        raise DataError(
            f"the training data has {num_rows} samples, fewer than one batch of {batch_size}; lower training.batch_size or add data"
        )


def _summarise_run(recipe: Recipe) -> str:
    """Return the length, batch size, optimizer and folder of a run in one line."""
    training = recipe.training
    length = (
        f"{training.max_steps} steps"
        if training.max_steps
        else f"{training.num_epochs} epochs"
        if training.num_epochs
        else "no length yet"
    )
    batch = f"batches of {training.batch_size * (training.gradient_accumulation_steps or 1)}"
    rate = "a learning rate from a range test" if training.learning_rate == "auto" else f"{training.learning_rate:g}"
    optimizer = f"{training.optimizer.name} at {rate}, {training.scheduler.name}"
    return f"valid; {recipe.task}: {length}, {batch}, {optimizer}, in {recipe.output_dir}/{recipe.run_name()}"


def _list_additions(recipe: Recipe) -> list[str]:
    """Return a line for each technique and for each other addition to plain training."""
    lines = []
    for technique in recipe.techniques:
        options = technique.model_dump(mode="json", by_alias=True).get("options", {})
        values = ", ".join(f"{key} {_format_value(value)}" for key, value in options.items() if value is not None)
        lines.append(f"techniques: {technique.name}" + (f" ({values})" if values else ""))
    if recipe.training.learning_rate == "auto":
        lines.append("training.learning_rate: auto, found by a range test before the first step, as in bottega lr-find")
    lines += list_precompute_notes(recipe)
    split = recipe.data.split
    if split is not None and split.folds is not None:
        lines.append(
            f"data.split: fold {split.fold} of {split.folds} is held out; bottega crossval trains one model per fold"
        )
    return lines


def list_precompute_notes(recipe: Recipe) -> list[str]:
    """Return a note on which states of a frozen language model can be precomputed."""
    num_prefix_tokens = getattr(recipe.model, "num_prefix_tokens", None)
    if num_prefix_tokens is None:
        return []
    if num_prefix_tokens:
        return [
            f"model.num_prefix_tokens {num_prefix_tokens}: every state of the language model depends on trained weights, so none "
            "can be precomputed; 0 runs the history without gradients"
        ]
    return ["model.num_prefix_tokens 0: no gradient passes through the history, so its activations are not saved"]


def _format_value(value: Any) -> str:
    return (
        f"[{', '.join(map(str, value))}]"
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
