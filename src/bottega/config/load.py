"""From names, files, dicts and flags to one resolved recipe, with every problem reported at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bottega.config import accelerate, bundled_recipes
from bottega.config.aliases import UnitlessCadence, apply_aliases, resolve_alias
from bottega.config.credentials import find_ambiguous_address, strip_credentials_in_text
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
from bottega.similar_names import find_similar_names

RecipeSource = str | Path | Mapping[str, Any]
"""A bundled name, a path that ends in .yaml, or plain values."""


class RecipeError(UsageError):
    """Problems of a recipe, a line each. `recipe` is what the entries without a problem make, where that is a recipe."""

    def __init__(self, message: str, recipe: Recipe | None = None) -> None:
        super().__init__(message)
        self.recipe = recipe


@dataclass(frozen=True)
class ResolvedRecipe:
    recipe: Recipe
    task_candidates: tuple[str, ...]
    """The tasks whose schema fits; one, unless a part of a recipe was checked that names no task."""
    notes: tuple[str, ...] = ()
    """What a person should know about how it was understood."""
    key_locations: Mapping[str, str] = field(default_factory=dict)
    """Key -> where it was said; keys left at their default are absent."""


def load_recipe(
    tasks: TaskRegistry,
    sources: Sequence[RecipeSource],
    overrides: Sequence[tuple[str, str, str]] = (),
    *,
    task: str | None = None,
) -> ResolvedRecipe:
    """A recipe that can be trained. Later sources win over earlier ones, and overrides over all."""
    return _resolve(tasks, _merged(tasks, sources, overrides), task=task, partial=False)


def load_saved_recipe(tasks: TaskRegistry, path: Path) -> Recipe:
    """The recipe.yaml of a run."""
    try:
        if not path.read_bytes().strip():
            raise UsageError("it is empty")
        return load_recipe(tasks, [path]).recipe
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror}; make it readable first") from None
    except UsageError as error:
        problem = first_line(error).removeprefix(f"{path}: ")
        raise UsageError(
            f"{path} is not a whole recipe ({problem}); delete it and start the training command again, which writes it anew "
            "and goes on, or start over with --fresh"
        ) from None


def check_recipe(
    tasks: TaskRegistry,
    sources: Sequence[RecipeSource],
    overrides: Sequence[tuple[str, str, str]] = (),
    *,
    task: str | None = None,
    alone: bool = True,
) -> ResolvedRecipe:
    """Like `load_recipe`, for a part of a recipe: what is not said is not missed, and several tasks may fit.

    Where it does not stand `alone`, and others will still change it, it may contradict itself until then.
    """
    return _resolve(tasks, _merged(tasks, sources, overrides), task=task, partial=True, alone=alone)


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe as a file; loading it gives an equal recipe."""
    return dump_yaml(recipe.to_plain_dict())


def list_bundled_recipes(tasks: TaskRegistry) -> list[tuple[str, str, str]]:
    """(name, task, what it is) of every recipe that comes with the program."""
    found = []
    for name in bundled_recipes.list_recipe_names():
        task = _merged(tasks, [name], ()).entries["task"].value
        found.append((name, task, bundled_recipes.read_header(bundled_recipes.RECIPE_FOLDER / f"{name}.yaml")))
    return found


def get_global_batch_size(recipe: Recipe, world: int) -> int:
    """Examples in one optimizer step over `world` processes."""
    training = recipe.training
    if training.gradient_accumulation_steps is not None:
        return training.batch_size * training.gradient_accumulation_steps * world
    if training.batch_size % world:
        sizes = ", ".join(str(n) for n in range(1, training.batch_size + 1) if training.batch_size % n == 0)
        raise UsageError(
            f"training.batch_size: {training.batch_size} cannot be shared evenly by {world} processes; "
            f"numbers of processes that can: {sizes}"
        )
    return training.batch_size


def _merged(tasks: TaskRegistry, sources: Sequence[RecipeSource], overrides: Sequence[tuple[str, str, str]]) -> Layer:
    """All layers in order, as one."""
    layers: list[Layer] = []
    for source in sources:
        layers += _layers_of(tasks, source, is_first=not any("origin" in layer.entries for layer in layers))
    layers.append(_command_line(overrides))
    adapting = [spec.adapt for spec in tasks.values() if spec.adapt is not None]
    total = Layer()
    for layer in layers:
        for adapt in adapting:
            total.notes += adapt(total.entries, layer.entries)
        total.entries = merge_layers(total.entries, layer.entries)
        total.lines.update(layer.lines)
        total.problems += layer.problems
        total.notes += layer.notes
    return total


def _layers_of(tasks: TaskRegistry, source: RecipeSource, *, is_first: bool) -> list[Layer]:
    """The layers of one source, its parents first."""
    chain: list[Layer] = []
    seen: list[str] = []
    beside: Path | None = None
    while True:
        layer, origin, folder = _read(tasks, source, beside, seen)
        parent = layer.entries.pop("extends", None)
        if is_first and not chain and origin and not accelerate.is_accelerate_config(layer):
            layer.entries.setdefault("origin", Entry(origin, Location(origin), "origin"))
        elif chain:
            layer.entries.pop("origin", None)
        layer = accelerate.translate_layer(layer) if accelerate.is_accelerate_config(layer) else apply_aliases(layer)
        chain.insert(0, layer)
        if parent is None or parent.value is None:
            return chain
        if not isinstance(parent.value, str):
            raise UsageError(f"{parent.location}: extends: expected a name or a path, got {format_value(parent.value)}")
        source, beside = parent.value, folder


def _read(
    tasks: TaskRegistry, source: RecipeSource, beside: Path | None, seen: list[str]
) -> tuple[Layer, str | None, Path]:
    """One source without its parents: its layer as typed, its name, and the folder its paths start from."""
    if isinstance(source, Mapping):
        return flatten_layer(source, file="settings", lines={}), None, Path()
    if source in tasks and source not in bundled_recipes.list_recipe_names():
        # A task without a recipe of its name: its defaults, to be filled by the files that follow.
        return flatten_layer({"task": source}, file=str(source), lines={}), str(source), Path()
    path, origin = bundled_recipes.find_recipe(str(source), beside=beside)
    known = str(path.resolve())
    if known in seen:
        raise UsageError(
            f"{path}: extends: goes round in a circle: {' -> '.join(Path(p).name for p in [*seen, known])}"
        )
    seen.append(known)
    document = read_yaml(path)
    if document.value is not None and not isinstance(document.value, dict):
        raise UsageError(f"{path}: a recipe is a block of keys, not {format_value(document.value)}")
    return flatten_layer(document.value or {}, file=str(path), lines=document.lines), origin, path.parent


def _command_line(overrides: Sequence[tuple[str, str, str]]) -> Layer:
    """All overrides are one layer, so that two spellings can disagree; the same spelling again replaces the first."""
    layer = Layer()
    for key, text, origin in overrides:
        said = flatten_layer({key: parse_value(text, f"{origin}: {key}")}, file=origin, lines={})
        layer.entries.update(said.entries)
    return apply_aliases(layer)


def _resolve(
    tasks: TaskRegistry, total: Layer, *, task: str | None, partial: bool, alone: bool = True
) -> ResolvedRecipe:
    flat, problems, notes = dict(total.entries), list(total.problems), list(total.notes)
    problems += _interpolations(flat)
    problems += _ambiguous(flat)
    notes += _settle(flat)
    said = flat.pop("task", None)
    names, wrong = _task_names(tasks, said, task)
    problems += wrong
    trials = [_validate(tasks, name, flat, total.lines) for name in names]
    fitting = [trial for trial in trials if not trial.problems]
    best = fitting[0] if fitting else min(trials, key=lambda trial: len(trial.problems))
    problems += best.problems
    if alone and len(fitting) == 1 and best.recipe is not None:
        for key, other, text in best.recipe.find_conflicts():
            problems.append(Problem(_said_last(key, other, flat), key, text, key))
    if not partial and len(fitting) <= 1:
        problems += _missing(best, flat)
    if len(trials) > 1 and not fitting:
        problems.append(Problem(None, "task", f"not given; the rest is nearest to {best.task}", "task"))
    if len(fitting) > 1 and not partial:
        problems.append(
            Problem(None, "task", f"missing; the rest fits {', '.join(trial.task for trial in fitting)}", "task")
        )
    if problems:
        lines = dict.fromkeys(str(problem) for problem in _in_order(problems))
        is_known = len(names) == 1 and not wrong
        rest = _without(problems, type(best.recipe), flat) if is_known and best.recipe is not None else None
        raise RecipeError(strip_credentials_in_text("\n".join(lines)), rest)
    assert best.recipe is not None
    notes += _batch_note(best.recipe)
    where = {key: str(entry.location) for key, entry in flat.items()}
    return ResolvedRecipe(best.recipe, tuple(trial.task for trial in fitting), tuple(notes), where)


def _task_names(tasks: TaskRegistry, said: Entry | None, task: str | None) -> tuple[list[str], list[Problem]]:
    """Which tasks to try."""
    name = task if task is not None else said.value if said else None
    if name is None:
        return list(tasks), []
    if isinstance(name, str) and name in tasks:
        return [name], []
    near = find_similar_names(str(name), tasks)
    hint = f"; did you mean {near[0]}?" if near else ""
    hint = hint or "; a task of a plugin needs --plugin FILE"
    message = f"expected one of {', '.join(tasks)}, got {format_value(name)}{hint}"
    return near or list(tasks)[:1], [Problem(said.location if said and task is None else None, "task", message, "task")]


@dataclass(frozen=True)
class _Trial:
    task: str
    recipe: Recipe | None
    problems: list[Problem]


def _validate(tasks: TaskRegistry, task: str, flat: FlatConfig, lines: Mapping[str, Location]) -> _Trial:
    """Hold the flat map against one task's schema."""
    schema = tasks.get_schema(task, flat)
    try:
        return _Trial(task, schema.model_validate(nest_entries(flat)), [])
    except ValidationError as error:
        problems = describe_validation_error(error, schema=schema, flat=flat, lines=lines)
        problems = [_of_another_form(tasks, problem, task, schema) for problem in problems]
        return _Trial(task, _without(problems, schema, flat), problems)


def _of_another_form(tasks: TaskRegistry, problem: Problem, task: str, schema: type[Recipe]) -> Problem:
    """Who writes image_size into a classifier of text has not mistyped it."""
    if not problem.message.startswith("unknown key"):
        return problem
    key = next(iter(resolve_alias(problem.typed_key, 0)))
    other = tasks.find_input_with_key(task, schema, key)
    return (
        problem if other is None else replace(problem, message=f"is a key of data.input={other}; say that too", key=key)
    )


def _without(problems: list[Problem], schema: type[Recipe], flat: FlatConfig) -> Recipe | None:
    """The recipe that the entries without a problem make, so that what is missing is reported in the same breath."""

    def is_good(key: str, entry: Entry) -> bool:
        # Not by the beginning of what was typed: `--data` is short for one key, and not the block of that name.
        return has_key(key, schema) and not any(
            problem.typed_key == entry.typed_key or are_nested(problem.key, key) for problem in problems
        )

    try:
        return schema.model_validate(nest_entries({key: entry for key, entry in flat.items() if is_good(key, entry)}))
    except ValidationError:
        return None


def _said_last(key: str, other: str, flat: FlatConfig) -> Location | None:
    """Where two keys came to disagree: outside of files, where one of them was said there."""
    places = [flat[name].location for name in (key, other) if name in flat]
    return next((where for where in places if not where.line), places[0] if places else None)


def _missing(trial: _Trial, flat: FlatConfig) -> list[Problem]:
    """What a run cannot start without, unless the same key is reported already."""
    if trial.recipe is None:
        return []
    wrong = {problem.key for problem in trial.problems}
    wrong |= {other for pair in EXCLUSIVE_KEYS for other in pair if wrong & set(pair)}
    if wrong and _is_stream(flat):
        wrong |= set(LENGTH_KEYS)  # it says how long the run is, and may itself be what is wrong
    blocks = tuple(f"{key}." for key in wrong)
    missing = [
        (key, text) for key, text in trial.recipe.find_missing_keys() if key not in wrong and not key.startswith(blocks)
    ]
    return [
        Problem(*(locate_key(key, flat, {}) if key in flat else (None, key)), message, key) for key, message in missing
    ]


def _interpolations(flat: FlatConfig) -> list[Problem]:
    """`${HOME}` would make a recipe mean something else on another machine."""
    return [
        Problem(
            entry.location,
            entry.typed_key,
            "${...} is not replaced in a recipe; give the value on the command line",
            key,
        )
        for key, entry in flat.items()
        if re.search(r"\$\{[^}]*\}", str(entry.value))
    ]


def _ambiguous(flat: FlatConfig) -> list[Problem]:
    """Two addresses that only a possible credential tells apart would be read as one."""
    address = find_ambiguous_address({key: entry.value for key, entry in flat.items() if key.startswith("data.")})
    if address is None:
        return []
    text = f"{address} is given twice, with queries that differ only in what may be a credential; copy the files first"
    return [Problem(None, "data", text, "data")]


def _settle(flat: FlatConfig) -> list[str]:
    """What only the merged layers can decide: parts that are left out, the unit of bare cadences, and single betas."""
    notes = []
    for key in [key for key, entry in flat.items() if key.startswith("needs.") and entry.value is None]:
        if key.count(".") == 1:
            del flat[key]
    has_epochs = _value(flat, "training.num_epochs") is not None or _is_stream(flat)
    by_epochs = _value(flat, "training.max_steps") is None and has_epochs
    for key, entry in flat.items():
        if isinstance(entry.value, UnitlessCadence):
            amount = entry.value.amount
            flat[key] = replace(entry, value=f"{amount} epochs" if by_epochs else amount)
            notes.append(
                f"{entry.typed_key} {amount} is counted in {'epochs' if by_epochs else 'steps'}, like the run's length"
            )
    halves = [flat.pop(f"training.optimizer.beta{i}", None) for i in (1, 2)]
    if any(halves):
        pair = _value(flat, "training.optimizer.betas")
        usual = pair if isinstance(pair, list) and len(pair) == 2 else [0.9, 0.999]
        entry = next(half for half in halves if half)
        both = [half.value if half else usual[i] for i, half in enumerate(halves)]
        flat["training.optimizer.betas"] = replace(entry, value=both)
    return notes


def _is_stream(flat: FlatConfig) -> bool:
    return any(enables_stream(key, entry) for key, entry in flat.items())


def _value(flat: FlatConfig, key: str) -> Any:
    return flat[key].value if key in flat else None


def _batch_note(recipe: Recipe) -> list[str]:
    size, passes = recipe.training.batch_size, recipe.training.gradient_accumulation_steps
    if passes is None:
        return []
    return [f"batch_size {size} per process x accumulation {passes} = {size * passes} global with one process"]


def _in_order(problems: list[Problem]) -> list[Problem]:
    """By file and line, then the command line, then what is missing."""

    def place(problem: Problem) -> tuple[int, str, int]:
        where = problem.location or Location("")
        return (0 if where.line else 1 if problem.location else 2, where.file, where.line)

    return sorted(problems, key=place)
