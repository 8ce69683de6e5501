"""Load recipes: merge names, files, dicts and flags into one resolved recipe, and report all problems at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bottega.config import accelerate, bundled_recipes, technique_options
from bottega.config.aliases import UnitlessCadence, apply_aliases, resolve_alias
from bottega.config.credentials import find_ambiguous_secret
from bottega.config.error_messages import describe_validation_error, format_value, locate_key
from bottega.config.layers import (
    EXCLUSIVE_KEYS,
    LENGTH_KEYS,
    Entry,
    FlatConfig,
    Layer,
    Location,
    Problem,
    are_nested,
    enables_stream,
    flatten_layer,
    merge_layers,
    nest_entries,
)
from bottega.config.recipe import Recipe
from bottega.config.registry import TaskRegistry
from bottega.config.schema_keys import has_key
from bottega.config.yaml_io import dump_yaml, parse_value, read_yaml
from bottega.core.errors import EnvironmentProblem, UsageError, first_line
from bottega.redaction import redact_text, redact_values
from bottega.similar_names import find_similar_names

RecipeSource = str | Path | Mapping[str, Any]
"""A bundled recipe's name, a path that ends in .yaml, or a dict of values."""


class RecipeError(UsageError):
    """Problems of a recipe, one line each. `recipe` is built from the entries without a problem, if they make a valid recipe."""

    def __init__(self, message: str, recipe: Recipe | None = None) -> None:
        super().__init__(message)
        self.recipe = recipe


@dataclass(frozen=True)
class ResolvedRecipe:
    """A validated recipe, and how its settings were read."""

    recipe: Recipe
    task_candidates: tuple[str, ...]
    """The tasks whose schema fits: one, except for a partial recipe that names no task."""
    notes: tuple[str, ...] = ()
    """Messages for the user about how settings were interpreted."""
    key_locations: Mapping[str, str] = field(default_factory=dict)
    """Key -> file and line, or command line; keys left at their default are absent."""


def load_recipe(
    tasks: TaskRegistry,
    sources: Sequence[RecipeSource],
    overrides: Sequence[tuple[str, str, str]] = (),
    *,
    task: str | None = None,
) -> ResolvedRecipe:
    """Return a complete recipe. Later sources override earlier ones, and `overrides` (`flags.Override`) all; raises RecipeError."""
    return _resolve_layer(tasks, _merge_sources(tasks, sources, overrides), task=task, is_partial=False)


def load_saved_recipe(tasks: TaskRegistry, path: Path) -> Recipe:
    """Return the recipe that a run saved as recipe.yaml."""
    try:
        if not path.read_bytes().strip():
            raise UsageError("it is empty")
        return load_recipe(tasks, [path]).recipe
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror}; make it readable first") from None
    except UsageError as error:
        problem = first_line(error).removeprefix(f"{path}: ")
        raise UsageError(
            f"{path} is not a complete recipe ({problem}); delete it and run the training command again, which rewrites it "
            "and resumes, or start over with --fresh"
        ) from None


def check_recipe(
    tasks: TaskRegistry,
    sources: Sequence[RecipeSource],
    overrides: Sequence[tuple[str, str, str]] = (),
    *,
    task: str | None = None,
    check_conflicts: bool = True,
) -> ResolvedRecipe:
    """Return a partial recipe: unlike `load_recipe`, missing keys are allowed, and several tasks may fit.

    `check_conflicts=False` also allows keys that exclude each other, for a recipe that other settings will still change.
    """
    return _resolve_layer(
        tasks, _merge_sources(tasks, sources, overrides), task=task, is_partial=True, check_conflicts=check_conflicts
    )


def to_yaml(recipe: Recipe) -> str:
    """Return the text of a recipe file that loads as an equal recipe, unless it contains a secret: that is replaced by `***`."""
    return dump_yaml(redact_values(recipe.to_plain_dict()))


def list_bundled_recipes(tasks: TaskRegistry) -> list[tuple[str, str, str]]:
    """Return (name, task, first line of its header) of every bundled recipe."""
    recipes = []
    for name in bundled_recipes.list_recipe_names():
        task = _merge_sources(tasks, [name], ()).entries["task"].value
        recipes.append((name, task, bundled_recipes.read_header(bundled_recipes.RECIPE_FOLDER / f"{name}.yaml")))
    return recipes


def get_global_batch_size(recipe: Recipe, num_processes: int) -> int:
    """Return the number of examples in one optimizer step over `num_processes` processes."""
    training = recipe.training
    if training.gradient_accumulation_steps is not None:
        return training.batch_size * training.gradient_accumulation_steps * num_processes
    if training.batch_size % num_processes:
        sizes = ", ".join(str(n) for n in range(1, training.batch_size + 1) if training.batch_size % n == 0)
        raise UsageError(
            f"training.batch_size: {training.batch_size} is not divisible by {num_processes} processes; "
            f"use one of these numbers of processes: {sizes}"
        )
    return training.batch_size


def _merge_sources(
    tasks: TaskRegistry, sources: Sequence[RecipeSource], overrides: Sequence[tuple[str, str, str]]
) -> Layer:
    """Merge the layers of all sources and the command line, in order, into one."""
    layers: list[Layer] = []
    for source in sources:
        layers += _read_layers(tasks, source, sets_origin=not any("origin" in layer.entries for layer in layers))
    layers.append(_read_overrides(overrides))
    adapters = [spec.adapt for spec in tasks.values() if spec.adapt is not None]
    merged = Layer()
    for layer in layers:
        for adapt in adapters:
            merged.notes += adapt(merged.entries, layer.entries)
        options = technique_options.pop_options(layer.entries)
        merged.entries = merge_layers(merged.entries, layer.entries)
        merged.problems += technique_options.set_options(merged.entries, options)
        merged.lines.update(layer.lines)
        merged.problems += layer.problems
        merged.notes += layer.notes
    return merged


def _read_layers(tasks: TaskRegistry, source: RecipeSource, *, sets_origin: bool) -> list[Layer]:
    """Read one source and the recipes it extends, parents first; `sets_origin` makes its name the recipe's `origin`."""
    chain: list[Layer] = []
    visited: list[str] = []
    base_folder: Path | None = None
    while True:
        layer, origin, folder = _read_source(tasks, source, base_folder, visited)
        parent = layer.entries.pop("extends", None)
        if sets_origin and not chain and origin and not accelerate.is_accelerate_config(layer):
            layer.entries.setdefault("origin", Entry(origin, Location(origin), "origin"))
        elif chain:
            layer.entries.pop("origin", None)
        layer = accelerate.translate_layer(layer) if accelerate.is_accelerate_config(layer) else apply_aliases(layer)
        chain.insert(0, layer)
        if parent is None or parent.value is None:
            return chain
        if not isinstance(parent.value, str):
            raise UsageError(f"{parent.location}: extends: expected a name or a path, got {format_value(parent.value)}")
        source, base_folder = parent.value, folder


def _read_source(
    tasks: TaskRegistry, source: RecipeSource, base_folder: Path | None, visited: list[str]
) -> tuple[Layer, str | None, Path]:
    """Read one source without its parents: its layer as typed, its name, and the folder its paths are relative to."""
    if isinstance(source, Mapping):
        return flatten_layer(source, file="settings", lines={}), None, Path()
    if source in tasks and source not in bundled_recipes.list_recipe_names():
        # A task without a bundled recipe of its name stands for the task's defaults.
        return flatten_layer({"task": source}, file=str(source), lines={}), str(source), Path()
    path, origin = bundled_recipes.find_recipe(str(source), base_folder=base_folder)
    resolved = str(path.resolve())
    if resolved in visited:
        raise UsageError(
            f"{path}: extends: the recipes form a cycle: {' -> '.join(Path(p).name for p in [*visited, resolved])}; remove one extends"
        )
    visited.append(resolved)
    document = read_yaml(path)
    if document.value is not None and not isinstance(document.value, dict):
        raise UsageError(f"{path}: expected a block of keys, got {format_value(document.value)}")
    return flatten_layer(document.value or {}, file=str(path), lines=document.lines), origin, path.parent


def _read_overrides(overrides: Sequence[tuple[str, str, str]]) -> Layer:
    """Return one layer of all overrides, so that conflicting aliases are found; of a repeated key the last value counts."""
    layer = Layer()
    for key, text, origin in overrides:
        setting = flatten_layer({key: parse_value(text, f"{origin}: {key}")}, file=origin, lines={})
        layer.entries.update(setting.entries)
    return apply_aliases(layer)


def _resolve_layer(
    tasks: TaskRegistry, layer: Layer, *, task: str | None, is_partial: bool, check_conflicts: bool = True
) -> ResolvedRecipe:
    """Validate the merged layer against the schema of its task, or against all tasks if it names none."""
    flat, problems, notes = dict(layer.entries), list(layer.problems), list(layer.notes)
    problems += _find_interpolations(flat)
    problems += _find_ambiguous_secrets(flat)
    notes += _finish_merge(flat)
    task_names, task_problems = _choose_tasks(tasks, flat.pop("task", None), task)
    problems += task_problems
    trials = [_validate_entries(tasks, name, flat, layer.lines) for name in task_names]
    fitting_trials = [trial for trial in trials if not trial.problems]
    best_trial = fitting_trials[0] if fitting_trials else min(trials, key=lambda trial: len(trial.problems))
    problems += best_trial.problems
    if check_conflicts and len(fitting_trials) == 1 and best_trial.recipe is not None:
        for key, other_key, message in best_trial.recipe.find_conflicts():
            problems.append(Problem(_locate_conflict(key, other_key, flat), key, message, key))
    if not is_partial and len(fitting_trials) <= 1:
        problems += _find_missing_keys(best_trial, flat)
    if len(trials) > 1 and not fitting_trials:
        problems.append(Problem(None, "task", f"missing; the other keys fit {best_trial.task} best", "task"))
    if len(fitting_trials) > 1 and not is_partial:
        message = f"missing; the other keys fit {', '.join(trial.task for trial in fitting_trials)}: set one of them"
        problems.append(Problem(None, "task", message, "task"))
    if problems:
        lines = dict.fromkeys(str(problem) for problem in _sort_problems(problems))
        is_task_known, valid_part = len(task_names) == 1 and not task_problems, None
        if is_task_known and best_trial.recipe is not None:
            valid_part = _validate_without_problems(problems, type(best_trial.recipe), flat)
        raise RecipeError(redact_text("\n".join(lines)), valid_part)
    assert best_trial.recipe is not None
    notes += _list_batch_notes(best_trial.recipe)
    locations = {key: str(entry.location) for key, entry in flat.items()}
    return ResolvedRecipe(best_trial.recipe, tuple(trial.task for trial in fitting_trials), tuple(notes), locations)


def _choose_tasks(tasks: TaskRegistry, entry: Entry | None, task: str | None) -> tuple[list[str], list[Problem]]:
    """Return the names of the tasks whose schemas are tried, and the problem with an unknown name."""
    name = task if task is not None else entry.value if entry else None
    if name is None:
        return list(tasks), []
    if isinstance(name, str) and name in tasks:
        return [name], []
    similar = find_similar_names(str(name), tasks)
    hint = f"; did you mean {similar[0]}?" if similar else "; to use a task of a plugin, add --plugin FILE"
    message = f"expected one of {', '.join(tasks)}, got {format_value(name)}{hint}"
    location = entry.location if entry and task is None else None
    return similar or list(tasks)[:1], [Problem(location, "task", message, "task")]


@dataclass(frozen=True)
class _Trial:
    """The outcome of validating the settings against one task's schema."""

    task: str
    recipe: Recipe | None
    problems: list[Problem]


def _validate_entries(tasks: TaskRegistry, task: str, flat: FlatConfig, lines: Mapping[str, Location]) -> _Trial:
    """Validate the settings against one task's schema."""
    schema = tasks.get_schema(task, flat)
    try:
        return _Trial(task, schema.model_validate(nest_entries(flat)), [])
    except ValidationError as error:
        problems = describe_validation_error(error, schema=schema, flat=flat, lines=lines)
        problems = [_suggest_input(tasks, problem, task, schema) for problem in problems]
        return _Trial(task, _validate_without_problems(problems, schema, flat), problems)


def _suggest_input(tasks: TaskRegistry, problem: Problem, task: str, schema: type[Recipe]) -> Problem:
    """Name the data.input that has an unknown key: image_size in a text classifier is not a typing error."""
    if not problem.message.startswith("unknown key"):
        return problem
    key = next(iter(resolve_alias(problem.typed_key, 0)))
    input_name = tasks.find_input_with_key(task, schema, key)
    if input_name is None:
        return problem
    return replace(problem, message=f"unknown key without data.input={input_name}; add that", key=key)


def _validate_without_problems(problems: list[Problem], schema: type[Recipe], flat: FlatConfig) -> Recipe | None:
    """Build the recipe from the entries without a problem, so that missing keys can be reported at the same time."""

    def is_valid(key: str, entry: Entry) -> bool:
        # Not by the prefix of the typed key: `--data` is an alias of one key, not the block of that name.
        return has_key(key, schema) and not any(
            problem.typed_key == entry.typed_key or are_nested(problem.key, key) for problem in problems
        )

    try:
        return schema.model_validate(nest_entries({key: entry for key, entry in flat.items() if is_valid(key, entry)}))
    except ValidationError:
        return None


def _locate_conflict(key: str, other_key: str, flat: FlatConfig) -> Location | None:
    """Return where to report that two keys exclude each other: the command line if it sets one of them, else the first key that is set."""
    locations = [flat[name].location for name in (key, other_key) if name in flat]
    return next((location for location in locations if not location.line), locations[0] if locations else None)


def _find_missing_keys(trial: _Trial, flat: FlatConfig) -> list[Problem]:
    """Return the problems of required keys that are missing, unless the same key already has a problem."""
    if trial.recipe is None:
        return []
    problem_keys = {problem.key for problem in trial.problems}
    problem_keys |= {other for pair in EXCLUSIVE_KEYS for other in pair if problem_keys & set(pair)}
    if problem_keys and _is_stream(flat):
        problem_keys |= set(LENGTH_KEYS)  # the stream determines the length, and may itself have the problem
    blocks = tuple(f"{key}." for key in problem_keys)
    missing = [
        (key, message)
        for key, message in trial.recipe.find_missing_keys()
        if key not in problem_keys and not key.startswith(blocks)
    ]
    return [
        Problem(*(locate_key(key, flat, {}) if key in flat else (None, key)), message, key) for key, message in missing
    ]


def _find_interpolations(flat: FlatConfig) -> list[Problem]:
    """Refuse `${HOME}` and the like, which would make a recipe mean something else on another machine."""
    message = "${...} is not expanded in a recipe; give the value on the command line"
    return [
        Problem(entry.location, entry.typed_key, message, key)
        for key, entry in flat.items()
        if re.search(r"\$\{[^}]*\}", str(entry.value))
    ]


def _find_ambiguous_secrets(flat: FlatConfig) -> list[Problem]:
    problem = find_ambiguous_secret({key: entry.value for key, entry in flat.items()})
    return [] if problem is None else [Problem(None, *problem, problem[0])]


def _finish_merge(flat: FlatConfig) -> list[str]:
    """Resolve what depends on all layers: removed dependencies, the unit of unitless cadences, and single betas."""
    notes = []
    for key in [key for key, entry in flat.items() if key.startswith("needs.") and entry.value is None]:
        if key.count(".") == 1:
            del flat[key]
    has_epochs = _get_value(flat, "training.num_epochs") is not None or _is_stream(flat)
    is_by_epochs = _get_value(flat, "training.max_steps") is None and has_epochs
    for key, entry in flat.items():
        if isinstance(entry.value, UnitlessCadence):
            amount = entry.value.amount
            flat[key] = replace(entry, value=f"{amount} epochs" if is_by_epochs else amount)
            notes.append(
                f"{entry.typed_key} {amount} is counted in {'epochs' if is_by_epochs else 'steps'}, like the length of the run"
            )
    betas = [flat.pop(f"training.optimizer.beta{i}", None) for i in (1, 2)]
    if any(betas):
        pair = _get_value(flat, "training.optimizer.betas")
        defaults = pair if isinstance(pair, list) and len(pair) == 2 else [0.9, 0.999]
        entry = next(beta for beta in betas if beta)
        values = [beta.value if beta else defaults[i] for i, beta in enumerate(betas)]
        flat["training.optimizer.betas"] = replace(entry, value=values)
    return notes


def _is_stream(flat: FlatConfig) -> bool:
    return any(enables_stream(key, entry) for key, entry in flat.items())


def _get_value(flat: FlatConfig, key: str) -> Any:
    return flat[key].value if key in flat else None


def _list_batch_notes(recipe: Recipe) -> list[str]:
    size, accumulation_steps = recipe.training.batch_size, recipe.training.gradient_accumulation_steps
    if accumulation_steps is None:
        return []
    return [
        f"batch_size {size} per process x accumulation {accumulation_steps} = {size * accumulation_steps} global with one process"
    ]


def _sort_problems(problems: list[Problem]) -> list[Problem]:
    """Sort by file and line, then problems of the command line, then missing keys."""

    def get_sort_key(problem: Problem) -> tuple[int, str, int]:
        location = problem.location or Location("")
        return (0 if location.line else 1 if problem.location else 2, location.file, location.line)

    return sorted(problems, key=get_sort_key)
