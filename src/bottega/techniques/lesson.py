"""What is learned from what: all that a technique may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from bottega.callbacks.console import Console
from bottega.core.callback import Callback
from bottega.core.engine import Engine
from bottega.core.rundir import RunDirectory
from bottega.core.task import Task
from bottega.data.loading.loader import Loader
from bottega.data.order.orders import Order
from bottega.data.sources.source import Source
from bottega.tasks.branch import Branch

OpenRun = Callable[..., Any]
"""`open_run(path, device=...)` of bottega.run.saved, which techniques do not import: it applies them itself."""


class Begin(Protocol):
    def __call__(self, engine: Engine, loader: Loader, *, resumed: bool) -> None:
        """Called once before the first step, with everything in place; `resumed` where a checkpoint was loaded."""


@dataclass(frozen=True)
class Lesson:
    """A task, its samples and their order, and what measures it."""

    task: Task
    training: Source
    order: Order | None
    """None is the plain shuffle, or the stages of a curriculum."""
    validation: Source | None
    metrics: tuple[str, ...]
    frozen: Mapping[str, str] = field(default_factory=dict)
    """Name -> hash of the models that it is built on and does not train."""
    notes: tuple[str, ...] = ()
    built: Callable[[Lesson, Engine], Lesson] | None = None
    """The lesson with what only the built model can tell, such as the hash of its base."""
    begin: Begin | None = None
    callbacks: tuple[Callback, ...] = ()
    """Who watches besides, in every process and before all others."""
    summary: Callable[[dict[str, float]], dict[str, float]] = lambda metrics: metrics
    """An evaluation with what follows from its means."""
    finish: Callable[[RunDirectory, Console], None] | None = None
    """Called once after the last step, by the main process."""

    open_run: OpenRun | None = None
    """Opens a finished run by its directory, for a technique that is built on one."""

    @classmethod
    def of(cls, branch: Branch, *, open_run: OpenRun | None = None) -> Lesson:
        return cls(
            task=branch.task,
            training=branch.training(),
            order=branch.order,
            validation=branch.validation(),
            metrics=branch.metrics,
            frozen=branch.frozen,
            notes=tuple(branch.notes),
            open_run=open_run,
        )

    def with_built(self, engine: Engine) -> Lesson:
        """The lesson once its engine is built."""
        return self.built(self, engine) if self.built is not None else self

    def building(self, built: Callable[[Lesson, Engine], Lesson]) -> Lesson:
        """With `built` after what looks at the built model already."""
        earlier = self.built

        def both(lesson: Lesson, engine: Engine) -> Lesson:
            return built(earlier(lesson, engine) if earlier is not None else lesson, engine)

        return replace(self, built=both)

    def beginning(self, begin: Begin) -> Lesson:
        """With `begin` after what is begun with already."""
        earlier = self.begin

        def both(engine: Engine, loader: Loader, *, resumed: bool) -> None:
            if earlier is not None:
                earlier(engine, loader, resumed=resumed)
            begin(engine, loader, resumed=resumed)

        return replace(self, begin=both)
