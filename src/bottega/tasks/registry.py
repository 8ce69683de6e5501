"""The registry of tasks: those that come with Bottega, and those that plugins add."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bottega.config.recipe import Recipe
from bottega.config.registry import TaskRegistry
from bottega.config.task_spec import TaskSpec
from bottega.core.errors import UsageError
from bottega.core.model_spec import resolve_reference

if TYPE_CHECKING:
    from bottega.tasks.workload import Workload

LISTED_FIRST = (
    "language",
    "classify",
    "generation",
    "autoencode",
    "align",
    "personalize",
    "routing",
    "recall",
    "multitask",
)
"""Order in which tasks are listed; others follow by name."""


def _load_installed() -> None:
    from bottega.tasks.plugins import load_installed

    load_installed()


def _iterate_bundled() -> Iterator[TaskSpec]:
    """Yield the SPEC, or the SPECS, of each spec.py in a folder beside this file; these import no framework."""
    names = {path.parent.name for path in Path(__file__).parent.glob("*/spec.py")}
    for name in (*LISTED_FIRST, *sorted(names - {*LISTED_FIRST})):
        module = import_module(f"bottega.tasks.{name}.spec")
        yield from getattr(module, "SPECS", None) or (module.SPEC,)


TASKS = TaskRegistry(_iterate_bundled(), discover=_load_installed)


def find_spec(recipe: Recipe) -> TaskSpec:
    """Return the spec of a recipe's task."""
    return TASKS[recipe.task]


def refusal_error(recipe: Recipe, verb: str) -> UsageError:
    """Return the error for a verb that the task does not support."""
    defaults = {
        "generate": f"a run of {recipe.task} does not generate; bottega evaluate measures it",
        "predict": f"this is a run of {recipe.task}, which is not a classifier",
        "prepare": f"task: the data of {recipe.task} cannot be prepared",
    }
    reason = find_spec(recipe).unsupported_verbs.get(verb) or defaults[verb]
    return UsageError(reason.format(input=getattr(recipe.data, "input", None)))


def open_workload(recipe: Recipe, *, progress: Any, processor: Path | None = None) -> Workload:
    """Open the task of a recipe: read, tokenise and cache its data, and build its loss. No engine exists yet.

    `processor` is the processor folder of a resumed run, passed to tasks that reuse it instead of computing it again.
    """
    spec = find_spec(recipe)
    options = {"processor": processor} if processor is not None and spec.reuses_processor else {}
    workload: Workload = resolve_reference(spec.open)(recipe, progress=progress, **options)
    return workload


def reopen_workload(recipe: Recipe, processor: Path, fingerprint: str) -> Workload:
    """Return the workload of a finished run from its processor; its data is read when used, and must be unchanged."""
    from bottega.tasks.data_paths import read_start_folders

    workload: Workload = resolve_reference(find_spec(recipe).reopen)(recipe, processor, fingerprint)
    workload.data.started_in = read_start_folders(processor)
    return workload
