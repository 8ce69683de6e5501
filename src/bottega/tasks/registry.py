"""The registry of tasks: those that come with Bottega, and those that plugins add."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bottega.config.recipe import Recipe
from bottega.config.registry import TaskRegistry
from bottega.config.task_spec import TaskSpec
from bottega.core.model_spec import resolve
from bottega.tasks.align.spec import SPEC as ALIGN
from bottega.tasks.autoencode.spec import SPECS as AUTOENCODERS
from bottega.tasks.classify.spec import SPEC as CLASSIFY
from bottega.tasks.generation.spec import SPECS as GENERATORS
from bottega.tasks.language.spec import SPEC as LANGUAGE
from bottega.tasks.multitask.spec import SPEC as MULTITASK
from bottega.tasks.personalize.spec import SPEC as PERSONALIZE
from bottega.tasks.recall.spec import SPEC as RECALL
from bottega.tasks.routing.spec import SPEC as ROUTING

if TYPE_CHECKING:
    from bottega.tasks.branch import Branch


def _load_installed() -> None:
    from bottega.tasks.plugins import load_installed

    load_installed()


TASKS = TaskRegistry(
    (LANGUAGE, CLASSIFY, *GENERATORS, *AUTOENCODERS, ALIGN, PERSONALIZE, ROUTING, RECALL, MULTITASK),
    discover=_load_installed,
)


def spec_of(recipe: Recipe) -> TaskSpec:
    """The task of a recipe."""
    return TASKS[recipe.task]


def prepare(recipe: Recipe, *, say: Any, codec: Path | None = None) -> Branch:
    """Everything that happens before an engine exists: data read, tokenised and cached, the task known.

    `codec` is of a run that goes on; a task that keeps in it what models could say otherwise today `remembers`.
    """
    spec = spec_of(recipe)
    more = {"codec": codec} if codec is not None and spec.remembers else {}
    branch: Branch = resolve(spec.open)(recipe, say=say, **more)
    return branch


def reopen(recipe: Recipe, codec: Path, fingerprint: str) -> Branch:
    """The branch of a finished run, from its own codec. Its data is read when asked for, and must be the same still."""
    from bottega.tasks.located import recorded_folders

    branch: Branch = resolve(spec_of(recipe).reopen)(recipe, codec, fingerprint)
    branch.started_in = recorded_folders(codec)
    return branch
