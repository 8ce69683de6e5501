"""One file, one branch: it joins a task with its data and codec, so that neither has to know the other.

A newcomer's branch is found by the name of its task; everything else (loop, engine, verbs) works on any branch.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from bottega.config.recipe import Recipe
from bottega.tasks.branch import Branch
from bottega.tasks.located import recorded_folders

MODULES = {
    "language": "bottega.tasks.language.branch",
    "classify": "bottega.tasks.classify.media",
    "image": "bottega.tasks.generation.image",
    "audio": "bottega.tasks.generation.audio",
    "video": "bottega.tasks.generation.video",
    "image_vae": "bottega.tasks.autoencode.vae",
    "image_tokens": "bottega.tasks.autoencode.tokens",
    "align": "bottega.tasks.align.branch",
    "personalize": "bottega.tasks.personalize.branch",
    "routing": "bottega.tasks.routing.branch",
    "recall": "bottega.tasks.recall.branch",
    "multitask": "bottega.tasks.multitask.branch",
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
    return import_module(MODULES[recipe.task])
