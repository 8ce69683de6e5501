"""What is learned from what: all that a technique may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bottega.callbacks.console import Console
from bottega.core.callback import Callback
from bottega.core.rundir import RunDirectory
from bottega.core.task import Task
from bottega.data.loading.loader import Loader
from bottega.data.order.orders import Order
from bottega.data.sources.source import Source
from bottega.tasks.branch import Branch

if TYPE_CHECKING:
    from bottega.engines.torch import TorchEngine

OpenRun = Callable[..., Any]
"""`open_run(path, device=...)` of bottega.run.saved, which techniques do not import: it applies them itself."""


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
    begin: Callable[[TorchEngine, Loader], None] | None = None
    """Called once before the first step, with everything in place."""
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

    def beginning(self, begin: Callable[[TorchEngine, Loader], None]) -> Lesson:
        """With `begin` after what is begun with already."""
        earlier = self.begin

        def both(engine: TorchEngine, loader: Loader) -> None:
            if earlier is not None:
                earlier(engine, loader)
            begin(engine, loader)

        return replace(self, begin=both)
