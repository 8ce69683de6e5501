"""The declaration of a technique: its options, what it conflicts with, and the function that applies it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bottega.config.section import Section
from bottega.core.model_spec import Reference

TECHNIQUES_KEY = "techniques"
Conflict = tuple[str, str, str]
"""(key, other key, message) of two settings that exclude each other."""

ANY_VALUE = object()


@dataclass(frozen=True)
class KeyConflict:
    """A recipe key that a technique does not support."""

    key: str
    message: str
    """Why, and what to do; `{technique}` and `{value}` are filled in."""
    value: Any = ANY_VALUE
    """The unsupported value; by default any that is not null, false or 0."""
    option: str | None = None
    """If set, the conflict exists only where this option of the technique differs from its default."""


@dataclass(frozen=True)
class TechniqueSpec:
    """One entry of the registry; `techniques/<name>/config.py` has it as SPEC."""

    name: str
    options: type[Section]
    apply: Reference
    """(plan, options, recipe, workload) -> the training plan with the technique applied."""
    conflicts: Mapping[str, str] = field(default_factory=dict)
    """Other technique -> why the two cannot be combined, and what to do. One of the two declares it."""
    must_follow: Mapping[str, str] = field(default_factory=dict)
    """Other technique -> why this one has to be listed after it, and what to do."""
    key_conflicts: tuple[KeyConflict, ...] = ()
    """Recipe keys that the technique does not support."""
    option_aliases: Mapping[str, str] = field(default_factory=dict)
    """Name of an option in other libraries -> its name here."""
    convert_options: Callable[[dict[str, Any]], dict[str, Any]] = lambda options: options
    """Converts values that other libraries write differently."""
    inject: Reference | None = None
    """(task, options, *, train, random_modules, start) -> the task with new modules injected into its frozen model, for techniques whose
    runs save these modules alone. Called in training and whenever a run is opened again."""
    is_sequential: bool = False
    """Whether it needs sources that are trained on one after the other (`data.mixture: sequence`)."""
    needs_sources: bool = False
    """Whether it needs sources or labels, which data generated on the fly does not have."""
    supports_multitask: bool = False
    """Whether it can be used with `task: multitask`."""
    jax_values: Mapping[str, tuple[Any, ...]] | None = None
    """Option -> values that `engine: jax` has; options that are not listed have no influence. None if it has no JAX form."""


TECHNIQUES: dict[str, TechniqueSpec] = {}
"""Name -> technique, in the order of documentation. bottega.tasks.recipes fills it."""
