"""Descriptions of a task's models, which an engine builds; free of any framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from operator import attrgetter
from typing import Any

Reference = str | Callable[..., Any]
"""A function or class, or its name ("package.module:function" or "package.module:Class.method"), imported only when used.

`{framework}` in a name stands for the framework of the engine, torch or jax."""


def resolve_reference(reference: Reference, framework: str = "torch") -> Any:
    """Return the function or class that a reference names."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.format(framework=framework).partition(":")
    return attrgetter(name)(import_module(module))


def return_built(model: Any) -> Any:
    """Return a model that is built already: the architecture of `ModelSpec.of`."""
    return model


Change = Callable[[Mapping[str, Any], int], None]
"""`change(models, seed)` modifies `models["model"]` in place after all models are built."""


@dataclass(frozen=True)
class Initial:
    """Initialisation of a model: `rule(model, seed, **options)` sets every parameter as a function of seed and name."""

    rule: Reference
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSpec:
    """One model: its architecture and the source of its weights.

    The engine calls `architecture(config, **options)`, then loads the folder `pretrained` by `load(model, folder)`, or
    applies `initial` if there is none, then applies `changes` in order. If there is neither `pretrained` nor `initial`,
    the framework draws the weights from the seed of the run.
    """

    architecture: Reference
    config: Any = None
    """First argument of the architecture: its hyperparameters, or the folder of a complete model."""
    options: Mapping[str, Any] = field(default_factory=dict)
    initial: Initial | None = None
    pretrained: str | None = None
    """A folder, or a hub name if `load` can download it."""
    load: Reference | None = "bottega.models.folders.pretrained:load_weights"
    """None if the architecture reads the weights itself; it is then also called with `folder`."""
    is_filled: bool = False
    """Whether `initial` or `load` writes every tensor, so that the model can be built on the meta device first."""
    is_seeded: bool = False
    """Whether the architecture draws random values itself; it is then also called with `seed`."""
    starts_initial: bool = False
    """Whether `load` may leave parameters out; these keep the values of `initial`, which is then applied first."""
    parts: Mapping[str, ModelSpec] = field(default_factory=dict)
    """Models that this one consists of, built first and passed to the architecture as its `config`."""
    changes: tuple[Change, ...] = ()
    """Modifications by techniques and tasks, applied in order after the model is built."""

    @classmethod
    def of(cls, model: Any) -> ModelSpec:
        """Return the spec of a model that is already built, such as a teacher."""
        return cls(return_built, model)

    def with_change(self, change: Change) -> ModelSpec:
        """Return the spec with one more change after the others."""
        return replace(self, changes=(*self.changes, change))
