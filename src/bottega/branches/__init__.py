"""One file, one branch: it joins a task with its data and codec, so that neither has to know the other.

A newcomer's branch is found by the name of its task; everything else (loop, engine, verbs) works on any branch.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from bottega.branches.branch import Branch
from bottega.branches.located import recorded_folders
from bottega.config.recipe import BUILT_TASKS, Recipe
from bottega.core.errors import UsageError

MODULES = {
    "language": "bottega.branches.language",
    "classify": "bottega.branches.classify",
    "image": "bottega.branches.image",
    "audio": "bottega.branches.audio",
    "video": "bottega.branches.video",
    "image_vae": "bottega.branches.vae",
    "image_tokens": "bottega.branches.tokens",
    "align": "bottega.branches.align",
    "personalize": "bottega.branches.personalize",
    "routing": "bottega.branches.routing",
    "recall": "bottega.branches.recall",
    "multitask": "bottega.branches.multitask",
}


def prepare(recipe: Recipe, *, say: Any, codec: Path | None = None) -> Branch:
    """Everything that happens before an engine exists: data read, tokenised and cached, the task known.

    `codec` is of a run that goes on; a branch that keeps in it what models could say otherwise today `REMEMBERS`.
    """
    module = _module(recipe)
    more = {"codec": codec} if codec is not None and getattr(module, "REMEMBERS", False) else {}
    branch: Branch = module.prepare(recipe, say=say, **more)
    return branch


def reopen(recipe: Recipe, codec: Path, fingerprint: str) -> Branch:
    """The branch of a finished run, from its own codec. Its data is read when asked for, and must be the same still."""
    branch: Branch = _module(recipe).reopen(recipe, codec, fingerprint)
    branch.started_in = recorded_folders(codec)
    return branch


def _module(recipe: Recipe) -> Any:
    if recipe.task not in MODULES:
        raise UsageError(f"task: {recipe.task} cannot be trained yet; there is {', '.join(BUILT_TASKS)}")
    return import_module(MODULES[recipe.task])
