"""The declaration of a task: its recipe schemas, and the functions that open, prepare and preview it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bottega.config.layers import FlatConfig
from bottega.config.recipe import Recipe
from bottega.core.model_spec import Reference

Function = Reference
"""A function, or "module:name" to import it on first call, for a module that imports a framework."""

EMPTY_MAPPING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class TaskSpec:
    """One entry of the task registry, for bundled tasks and plugins alike; no other code lists tasks by name."""

    name: str
    recipe: type[Recipe]
    """The schema of its recipes; for a task with `inputs`, of recipes without `data.input`."""
    open: Function
    """(recipe, *, progress) -> the workload of a new run, with its data prepared. `progress(stage, done, total)` is called."""
    reopen: Function
    """(recipe, processor folder, data fingerprint) -> the workload of a finished run, from its saved processor."""
    reuses_processor: bool = False
    """Whether `open` also takes `processor`, the folder of a resumed run, to reuse the files cached there."""
    inputs: Mapping[str, type[Recipe]] = field(default_factory=lambda: EMPTY_MAPPING)
    """data.input -> schema, for a task with several kinds of input."""
    prepare: Function | None = None
    """(recipe, *, progress) -> the tables of `bottega prepare` and `bottega data`."""
    preview: Function = "bottega.data.prepare.preview:Preview"
    """A class that prints, plots and exports the rows of those tables."""
    files: tuple[str, ...] = ()
    """Kinds of files (`bottega data PATH`) that this task trains on."""
    fields: frozenset[str] = frozenset()
    """Fields of a record that identify its table as data of this task."""
    init_values: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({"data.train.path": "data/train"}))
    """Values that `bottega init` adds to the defaults, so that the new recipe loads."""
    unsupported_verbs: Mapping[str, str] = field(default_factory=lambda: EMPTY_MAPPING)
    """Unsupported verb (prepare, generate, predict) -> message with the reason; {input} is data.input."""
    adapt: Callable[[FlatConfig, FlatConfig], list[str]] | None = None
    """(earlier entries, a later layer) -> notes; changes earlier entries that the later layer makes obsolete."""
    example_input: Callable[[Any, Path], str | None] | None = None
    """(recipe, processor folder) -> an example argument of `bottega predict RUN`."""
    rows_are_samples: bool = True
    """Whether a prepared row is one sample; a text is cut into several."""
    has_labels: bool = False
    """Whether each sample has one label: cross-validation folds are then stratified, and runs compared, by it."""
    supports_label_smoothing: bool = False
    """Whether its loss supports `training.label_smoothing`."""
    loss_is_cross_entropy: bool = False
    """Whether the loss is at least 0, and initially at most the logarithm of the number of classes."""
    jax_values: Mapping[str, tuple[Any, ...]] | None = None
    """Recipe key -> values that `engine: jax` has; keys that are not listed have no influence. None if the task has no JAX form."""
    allowed_in_multitask: bool = True
    """Whether it can be one of the tasks of `multitask`."""
    plugin: str | None = None
    """The file or package that it comes from, if it is not bundled."""

    @property
    def schemas(self) -> Mapping[str, type[Recipe]]:
        """data.input -> schema; a single schema has the empty name."""
        return self.inputs or {"": self.recipe}
