"""What an engine is to build: the models of a task as descriptions, free of any framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from operator import attrgetter
from typing import Any

Reference = str | Callable[..., Any]
"""A function or class: by name, "package.module:function" or "package.module:Class.method", so that nothing is imported before it is built; or itself."""


def resolve_reference(reference: Reference) -> Any:
    """The function or class that a spec names."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    return attrgetter(name)(import_module(module))


Change = Callable[[Mapping[str, Any], int], None]
"""`change(models, seed)` alters `models["model"]` in place, once all models are built."""


@dataclass(frozen=True)
class Initial:
    """The rule of initial values: `rule(model, seed, **options)` sets every parameter as a function of seed and name."""

    rule: Reference
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSpec:
    """One model: its architecture, and where its values come from.

    The engine calls `architecture(config, **options)`, then writes the values of the folder `pretrained` by
    `load(model, folder)`, or those of `initial` where there is none; then it applies the changes in their order. Without
    either the values are those that the framework draws for the architecture, from the seed of the run.
    """

    architecture: Reference
    config: Any = None
    """What the architecture is called with: a shape, or the folder of a model that comes whole."""
    options: Mapping[str, Any] = field(default_factory=dict)
    initial: Initial | None = None
    pretrained: str | None = None
    """A folder, or a hub name where `load` fetches one."""
    load: Reference | None = "bottega.models.folders.pretrained:load_weights"
    """None: the architecture reads the folder by itself, and is called with `folder` besides."""
    is_filled: bool = False
    """Whether `initial` or `load` writes every tensor, so that the model is made without memory first: a framework's own
    initial values would be drawn only to be overwritten, and a shard needs its own part alone."""
    is_seeded: bool = False
    """Whether the architecture draws values by itself, and is handed the `seed` besides."""
    starts_initial: bool = False
    """Whether `load` may leave parameters out: they keep the values of `initial`, which is then applied first."""
    parts: Mapping[str, ModelSpec] = field(default_factory=dict)
    """Models that this one is made of, built first and handed to the architecture as its `config`."""
    changes: tuple[Change, ...] = ()
    """What techniques and tasks do to the model after it is built, in order."""

    @classmethod
    def of(cls, model: Any) -> ModelSpec:
        """A model that is there already, such as a teacher that was opened."""
        return cls(lambda given: given, model)

    def changed(self, change: Change) -> ModelSpec:
        """The same model with one more change after the others."""
        return replace(self, changes=(*self.changes, change))
