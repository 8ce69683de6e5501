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

FIRST = ("language", "classify", "generation", "autoencode", "align", "personalize", "routing", "recall", "multitask")
"""The order in which they are listed; others follow by name."""


def _load_installed() -> None:
    from bottega.tasks.plugins import load_installed

    load_installed()


def _bundled() -> Iterator[TaskSpec]:
    """The specs of each folder here that has a spec.py: SPEC, or SPECS where it has several tasks. They load no framework."""
    there = {path.parent.name for path in Path(__file__).parent.glob("*/spec.py")}
    for name in (*FIRST, *sorted(there - {*FIRST})):
        module = import_module(f"bottega.tasks.{name}.spec")
        yield from getattr(module, "SPECS", None) or (module.SPEC,)


TASKS = TaskRegistry(_bundled(), discover=_load_installed)


def find_spec(recipe: Recipe) -> TaskSpec:
    """The task of a recipe."""
    return TASKS[recipe.task]


def refusal_error(recipe: Recipe, verb: str) -> UsageError:
    """What to say to a verb that the task does not answer."""
    usual = {
        "generate": f"a run of {recipe.task} does not generate; bottega evaluate measures it",
        "predict": f"this is a run of {recipe.task}, which is not a classifier",
        "prepare": f"task: the data of {recipe.task} cannot be prepared",
    }
    reason = find_spec(recipe).refuses.get(verb) or usual[verb]
    return UsageError(reason.format(input=getattr(recipe.data, "input", None)))


def open_workload(recipe: Recipe, *, progress: Any, processor: Path | None = None) -> Workload:
    """Everything that happens before an engine exists: data read, tokenised and cached, the task known.

    `codec` is of a run that goes on; a task that keeps in it what models could say otherwise today `remembers`.
    """
    spec = find_spec(recipe)
    more = {"processor": processor} if processor is not None and spec.reuses_processor else {}
    workload: Workload = resolve_reference(spec.open)(recipe, progress=progress, **more)
    return workload


def reopen_workload(recipe: Recipe, processor: Path, fingerprint: str) -> Workload:
    """The branch of a finished run, from its own codec. Its data is read when asked for, and must be the same still."""
    from bottega.tasks.data_paths import read_start_folders

    workload: Workload = resolve_reference(find_spec(recipe).reopen)(recipe, processor, fingerprint)
    workload.data.started_in = read_start_folders(processor)
    return workload
