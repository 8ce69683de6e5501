"""What a technique brings: its options, what it does not go with, and the function that applies it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bottega.config.section import Section
from bottega.core.model_spec import Reference

if TYPE_CHECKING:
    from bottega.config.recipe import Recipe

TECHNIQUES_KEY = "techniques"
Conflict = tuple[str, str, str]
"""(key, other key, message)."""


@dataclass(frozen=True)
class TechniqueSpec:
    """One entry of the registry; `techniques/<name>/config.py` has it as SPEC."""

    name: str
    options: type[Section]
    apply: Reference
    """(lesson, options, recipe, branch) -> the lesson with the technique."""
    find_conflicts: Callable[[Recipe, list[str]], Iterator[Conflict]] = lambda recipe, names: iter(())
    """What of a recipe, and of the other techniques by name, it does not go with."""
    option_aliases: Mapping[str, str] = field(default_factory=dict)
    """What other programs call an option -> its name here."""
    convert_options: Callable[[dict[str, Any]], dict[str, Any]] = lambda options: options
    """Values that other programs write otherwise."""
    inject: Reference | None = None
    """(task, options, *, train, fresh, start) -> the task with parts put into its model, which stays: runs then hold those
    parts alone. Called in training and wherever a run is opened again. None for a technique that puts nothing in."""
    is_sequential: bool = False
    """Whether it is about sources that come one after the other."""
    needs_sources: bool = False
    """Whether it needs sources or labels, which data that is made up as it is needed does not have."""
    supports_multitask: bool = False
    """Whether it goes with a model of several tasks."""


TECHNIQUES: dict[str, TechniqueSpec] = {}
"""Filled by bottega.tasks.recipes, which hands them to the loader, in the order in which they are listed."""
