"""What a task brings, in one object: its recipes, its data, its model, what it can be asked, how its rows are shown."""

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
"""A function, or "module:name" where importing it loads a framework; it is then imported when it is first called."""

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class TaskSpec:
    """One entry of the registry. Bundled tasks and plugins are described alike, and nothing else lists tasks by name."""

    name: str
    recipe: type[Recipe]
    """The schema of its recipes; where it has several, of those that do not say `data.input`."""
    open: Function
    """(recipe, *, say) -> what a run needs of the task: its data, read and prepared, and what is learned from it."""
    reopen: Function
    """(recipe, codec, fingerprint) -> the same for a finished run, from what it saved."""
    reuses_processor: bool = False
    """Whether `open` also takes `codec`, the folder of a run that goes on: its saved answers are used again."""
    inputs: Mapping[str, type[Recipe]] = field(default_factory=lambda: NOTHING)
    """data.input -> schema, for a task that takes several kinds of input."""
    prepare: Function | None = None
    """(recipe, *, progress) -> the tables of `bottega prepare` and `bottega data`."""
    preview: Function = "bottega.data.prepare.preview:Preview"
    """A class that shows, draws and exports the rows of those tables."""
    files: tuple[str, ...] = ()
    """Kinds of files (`bottega data PATH`) whose samples this task learns from."""
    fields: frozenset[str] = frozenset()
    """Fields of a record by which its table is one for this task."""
    init_values: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({"data.train.path": "data/train"}))
    """What a new recipe must say beside the defaults, so that it loads."""
    refuses: Mapping[str, str] = field(default_factory=lambda: NOTHING)
    """Verb (prepare, generate, predict) -> why the task does not answer it; {input} is data.input. It answers all others."""
    adapt: Callable[[FlatConfig, FlatConfig], list[str]] | None = None
    """(earlier entries, a later layer) -> notes; changes earlier entries that a later layer outdates."""
    asks: Callable[[Any, Path], str | None] | None = None
    """(recipe, codec of its run) -> words to try `bottega predict RUN` with."""
    rows_are_samples: bool = True
    """Whether a prepared row is a sample, and not, as a text is, cut into several."""
    has_labels: bool = False
    """Whether a sample has one label that its answer is judged by: folds are then stratified, and runs compared by it."""
    smooths_labels: bool = False
    """Whether its loss knows `training.label_smoothing`."""
    loss_is_cross_entropy: bool = False
    """Whether the loss is never below 0, and at the start no more than the logarithm of the number of answers."""
    combines: bool = True
    """Whether it can be one of several tasks of one model (`multitask`)."""
    plugin: str | None = None
    """The file or package that brought it, where it is not bundled."""

    @property
    def schemas(self) -> Mapping[str, type[Recipe]]:
        """data.input -> schema; one, under the empty name, where there is nothing to choose."""
        return self.inputs or {"": self.recipe}
