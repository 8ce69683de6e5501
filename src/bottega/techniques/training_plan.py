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
from bottega.tasks.workload import Workload

OpenRun = Callable[..., Any]
"""`open_run(path, device=...)` of bottega.run.saved, which techniques do not import: it applies them itself."""


class TrainStartHook(Protocol):
    def __call__(self, engine: Engine, loader: Loader, *, resumed: bool) -> None:
        """Called once before the first step, with everything in place; `resumed` where a checkpoint was loaded."""


@dataclass(frozen=True)
class TrainingPlan:
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
    built: Callable[[TrainingPlan, Engine], TrainingPlan] | None = None
    """The lesson with what only the built model can tell, such as the hash of its base."""
    begin: TrainStartHook | None = None
    callbacks: tuple[Callback, ...] = ()
    """Who watches besides, in every process and before all others."""
    summary: Callable[[dict[str, float]], dict[str, float]] = lambda metrics: metrics
    """An evaluation with what follows from its means."""
    finish: Callable[[RunDirectory, Console], None] | None = None
    """Called once after the last step, by the main process."""

    open_run: OpenRun | None = None
    """Opens a finished run by its directory, for a technique that is built on one."""

    @classmethod
    def from_workload(cls, workload: Workload, *, open_run: OpenRun | None = None) -> TrainingPlan:
        return cls(
            task=workload.task,
            training=workload.training(),
            order=workload.order,
            validation=workload.validation(),
            metrics=workload.metrics,
            frozen=workload.frozen_hashes,
            notes=tuple(workload.notes),
            open_run=open_run,
        )

    def complete(self, engine: Engine) -> TrainingPlan:
        """The lesson once its engine is built."""
        return self.built(self, engine) if self.built is not None else self

    def with_engine_built_hook(self, built: Callable[[TrainingPlan, Engine], TrainingPlan]) -> TrainingPlan:
        """With `built` after what looks at the built model already."""
        earlier = self.built

        def both(plan: TrainingPlan, engine: Engine) -> TrainingPlan:
            return built(earlier(plan, engine) if earlier is not None else plan, engine)

        return replace(self, built=both)

    def with_train_start_hook(self, begin: TrainStartHook) -> TrainingPlan:
        """With `begin` after what is begun with already."""
        earlier = self.begin

        def both(engine: Engine, loader: Loader, *, resumed: bool) -> None:
            if earlier is not None:
                earlier(engine, loader, resumed=resumed)
            begin(engine, loader, resumed=resumed)

        return replace(self, begin=both)
