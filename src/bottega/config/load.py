"""From names, files, dicts and flags to one resolved recipe, with every problem reported at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bottega.config import accelerate, bundled
from bottega.config.addresses import find_ambiguous, strip_text
from bottega.config.aliases import Bare, canonical, spell
from bottega.config.fields import has_key
from bottega.config.flat import (
    EITHER_OR,
    LENGTH,
    Entry,
    Flat,
    Layer,
    Problem,
    Where,
    are_nested,
    asks_for_stream,
    flatten,
    merge,
    nest,
)
from bottega.config.recipe import Recipe
from bottega.config.registry import TaskRegistry
from bottega.config.wording import locate, problems_of, shown
from bottega.config.yamlfile import parse_value, read_yaml, write_yaml
from bottega.core.errors import EnvironmentProblem, UsageError, first_line
from bottega.nearness import near_names

Source = str | Path | Mapping[str, Any]
"""A bundled name, a path that ends in .yaml, or plain values."""


class RecipeError(UsageError):
    """Problems of a recipe, a line each. `recipe` is what the entries without a problem make, where that is a recipe."""

    def __init__(self, message: str, recipe: Recipe | None = None) -> None:
        super().__init__(message)
        self.recipe = recipe


@dataclass(frozen=True)
class Resolved:
    recipe: Recipe
    task_candidates: tuple[str, ...]
    """The tasks whose schema fits; one, unless a part of a recipe was checked that names no task."""
    notes: tuple[str, ...] = ()
    """What a person should know about how it was understood."""
    said: Mapping[str, str] = field(default_factory=dict)
    """Key -> where it was said; keys left at their default are absent."""


def load_recipe(
    tasks: TaskRegistry,
    sources: Sequence[Source],
    overrides: Sequence[tuple[str, str, str]] = (),
    *,
    task: str | None = None,
) -> Resolved:
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
    sources: Sequence[Source],
    overrides: Sequence[tuple[str, str, str]] = (),
    *,
    task: str | None = None,
    alone: bool = True,
) -> Resolved:
    """Like `load_recipe`, for a part of a recipe: what is not said is not missed, and several tasks may fit.

    Where it does not stand `alone`, and others will still change it, it may contradict itself until then.
    """
    return _resolve(tasks, _merged(tasks, sources, overrides), task=task, partial=True, alone=alone)


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe as a file; loading it gives an equal recipe."""
    return write_yaml(recipe.plain())


def bundled_recipes(tasks: TaskRegistry) -> list[tuple[str, str, str]]:
    """(name, task, what it is) of every recipe that comes with the program."""
    found = []
    for name in bundled.names():
        task = _merged(tasks, [name], ()).entries["task"].value
        found.append((name, task, bundled.header(bundled.FOLDER / f"{name}.yaml")))
    return found


def global_batch(recipe: Recipe, world: int) -> int:
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


def _merged(tasks: TaskRegistry, sources: Sequence[Source], overrides: Sequence[tuple[str, str, str]]) -> Layer:
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
        total.entries = merge(total.entries, layer.entries)
        total.lines.update(layer.lines)
        total.problems += layer.problems
        total.notes += layer.notes
    return total


def _layers_of(tasks: TaskRegistry, source: Source, *, is_first: bool) -> list[Layer]:
    """The layers of one source, its parents first."""
    chain: list[Layer] = []
    seen: list[str] = []
    beside: Path | None = None
    while True:
        layer, origin, folder = _read(tasks, source, beside, seen)
        parent = layer.entries.pop("extends", None)
        if is_first and not chain and origin and not accelerate.is_accelerate(layer):
            layer.entries.setdefault("origin", Entry(origin, Where(origin), "origin"))
        elif chain:
            layer.entries.pop("origin", None)
        layer = accelerate.translate(layer) if accelerate.is_accelerate(layer) else canonical(layer)
        chain.insert(0, layer)
        if parent is None or parent.value is None:
            return chain
        if not isinstance(parent.value, str):
            raise UsageError(f"{parent.where}: extends: expected a name or a path, got {shown(parent.value)}")
        source, beside = parent.value, folder


def _read(tasks: TaskRegistry, source: Source, beside: Path | None, seen: list[str]) -> tuple[Layer, str | None, Path]:
    """One source without its parents: its layer as typed, its name, and the folder its paths start from."""
    if isinstance(source, Mapping):
        return flatten(source, file="settings", lines={}), None, Path()
    if source in tasks and source not in bundled.names():
        # A task without a recipe of its name: its defaults, to be filled by the files that follow.
        return flatten({"task": source}, file=str(source), lines={}), str(source), Path()
    path, origin = bundled.find(str(source), beside=beside)
    known = str(path.resolve())
    if known in seen:
        raise UsageError(
            f"{path}: extends: goes round in a circle: {' -> '.join(Path(p).name for p in [*seen, known])}"
        )
    seen.append(known)
    document = read_yaml(path)
    if document.value is not None and not isinstance(document.value, dict):
        raise UsageError(f"{path}: a recipe is a block of keys, not {shown(document.value)}")
    return flatten(document.value or {}, file=str(path), lines=document.lines), origin, path.parent


def _command_line(overrides: Sequence[tuple[str, str, str]]) -> Layer:
    """All overrides are one layer, so that two spellings can disagree; the same spelling again replaces the first."""
    layer = Layer()
    for key, text, origin in overrides:
        said = flatten({key: parse_value(text, f"{origin}: {key}")}, file=origin, lines={})
        layer.entries.update(said.entries)
    return canonical(layer)


def _resolve(tasks: TaskRegistry, total: Layer, *, task: str | None, partial: bool, alone: bool = True) -> Resolved:
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
        for key, other, text in best.recipe.contradictions():
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
        raise RecipeError(strip_text("\n".join(lines)), rest)
    assert best.recipe is not None
    notes += _batch_note(best.recipe)
    where = {key: str(entry.where) for key, entry in flat.items()}
    return Resolved(best.recipe, tuple(trial.task for trial in fitting), tuple(notes), where)


def _task_names(tasks: TaskRegistry, said: Entry | None, task: str | None) -> tuple[list[str], list[Problem]]:
    """Which tasks to try."""
    name = task if task is not None else said.value if said else None
    if name is None:
        return list(tasks), []
    if isinstance(name, str) and name in tasks:
        return [name], []
    near = near_names(str(name), tasks)
    hint = f"; did you mean {near[0]}?" if near else ""
    hint = hint or "; a task of a plugin needs --plugin FILE"
    message = f"expected one of {', '.join(tasks)}, got {shown(name)}{hint}"
    return near or list(tasks)[:1], [Problem(said.where if said and task is None else None, "task", message, "task")]


@dataclass(frozen=True)
class _Trial:
    task: str
    recipe: Recipe | None
    problems: list[Problem]


def _validate(tasks: TaskRegistry, task: str, flat: Flat, lines: Mapping[str, Where]) -> _Trial:
    """Hold the flat map against one task's schema."""
    schema = tasks.schema_of(task, flat)
    try:
        return _Trial(task, schema.model_validate(nest(flat)), [])
    except ValidationError as error:
        problems = problems_of(error, schema=schema, flat=flat, lines=lines)
        problems = [_of_another_form(tasks, problem, task, schema) for problem in problems]
        return _Trial(task, _without(problems, schema, flat), problems)


def _of_another_form(tasks: TaskRegistry, problem: Problem, task: str, schema: type[Recipe]) -> Problem:
    """Who writes image_size into a classifier of text has not mistyped it."""
    if not problem.message.startswith("unknown key"):
        return problem
    key = next(iter(spell(problem.typed, 0)))
    other = tasks.other_input(task, schema, key)
    return (
        problem if other is None else replace(problem, message=f"is a key of data.input={other}; say that too", key=key)
    )


def _without(problems: list[Problem], schema: type[Recipe], flat: Flat) -> Recipe | None:
    """The recipe that the entries without a problem make, so that what is missing is reported in the same breath."""

    def is_good(key: str, entry: Entry) -> bool:
        # Not by the beginning of what was typed: `--data` is short for one key, and not the block of that name.
        return has_key(key, schema) and not any(
            problem.typed == entry.typed or are_nested(problem.key, key) for problem in problems
        )

    try:
        return schema.model_validate(nest({key: entry for key, entry in flat.items() if is_good(key, entry)}))
    except ValidationError:
        return None


def _said_last(key: str, other: str, flat: Flat) -> Where | None:
    """Where two keys came to disagree: outside of files, where one of them was said there."""
    places = [flat[name].where for name in (key, other) if name in flat]
    return next((where for where in places if not where.line), places[0] if places else None)


def _missing(trial: _Trial, flat: Flat) -> list[Problem]:
    """What a run cannot start without, unless the same key is reported already."""
    if trial.recipe is None:
        return []
    wrong = {problem.key for problem in trial.problems}
    wrong |= {other for pair in EITHER_OR for other in pair if wrong & set(pair)}
    if wrong and _is_stream(flat):
        wrong |= set(LENGTH)  # it says how long the run is, and may itself be what is wrong
    blocks = tuple(f"{key}." for key in wrong)
    missing = [(key, text) for key, text in trial.recipe.missing() if key not in wrong and not key.startswith(blocks)]
    return [Problem(*(locate(key, flat, {}) if key in flat else (None, key)), message, key) for key, message in missing]


def _interpolations(flat: Flat) -> list[Problem]:
    """`${HOME}` would make a recipe mean something else on another machine."""
    return [
        Problem(entry.where, entry.typed, "${...} is not replaced in a recipe; give the value on the command line", key)
        for key, entry in flat.items()
        if re.search(r"\$\{[^}]*\}", str(entry.value))
    ]


def _ambiguous(flat: Flat) -> list[Problem]:
    """Two addresses that only a possible credential tells apart would be read as one."""
    address = find_ambiguous({key: entry.value for key, entry in flat.items() if key.startswith("data.")})
    if address is None:
        return []
    text = f"{address} is given twice, with queries that differ only in what may be a credential; copy the files first"
    return [Problem(None, "data", text, "data")]


def _settle(flat: Flat) -> list[str]:
    """What only the merged layers can decide: parts that are left out, the unit of bare cadences, and single betas."""
    notes = []
    for key in [key for key, entry in flat.items() if key.startswith("needs.") and entry.value is None]:
        if key.count(".") == 1:
            del flat[key]
    has_epochs = _value(flat, "training.num_epochs") is not None or _is_stream(flat)
    by_epochs = _value(flat, "training.max_steps") is None and has_epochs
    for key, entry in flat.items():
        if isinstance(entry.value, Bare):
            amount = entry.value.amount
            flat[key] = replace(entry, value=f"{amount} epochs" if by_epochs else amount)
            notes.append(
                f"{entry.typed} {amount} is counted in {'epochs' if by_epochs else 'steps'}, like the run's length"
            )
    halves = [flat.pop(f"training.optimizer.beta{i}", None) for i in (1, 2)]
    if any(halves):
        pair = _value(flat, "training.optimizer.betas")
        usual = pair if isinstance(pair, list) and len(pair) == 2 else [0.9, 0.999]
        entry = next(half for half in halves if half)
        both = [half.value if half else usual[i] for i, half in enumerate(halves)]
        flat["training.optimizer.betas"] = replace(entry, value=both)
    return notes


def _is_stream(flat: Flat) -> bool:
    return any(asks_for_stream(key, entry) for key, entry in flat.items())


def _value(flat: Flat, key: str) -> Any:
    return flat[key].value if key in flat else None


def _batch_note(recipe: Recipe) -> list[str]:
    size, passes = recipe.training.batch_size, recipe.training.gradient_accumulation_steps
    if passes is None:
        return []
    return [f"batch_size {size} per process x accumulation {passes} = {size * passes} global with one process"]


def _in_order(problems: list[Problem]) -> list[Problem]:
    """By file and line, then the command line, then what is missing."""

    def place(problem: Problem) -> tuple[int, str, int]:
        where = problem.where or Where("")
        return (0 if where.line else 1 if problem.where else 2, where.file, where.line)

    return sorted(problems, key=place)
