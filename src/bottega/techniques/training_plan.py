"""The training plan: task, data, order, metrics and hooks of a run, which techniques change."""

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
"""`open_run(path, device=..., engine=...)` of bottega.run.saved, which techniques do not import, because it applies techniques itself."""


class TrainStartHook(Protocol):
    """A function that prepares engine and loader before the first step."""

    def __call__(self, engine: Engine, loader: Loader, *, resumed: bool) -> None:
        """Called once before the first step; `resumed` if a checkpoint was loaded."""


@dataclass(frozen=True)
class TrainingPlan:
    """What a run trains: a task, its data and their order, its metrics, and hooks of techniques."""

    task: Task
    training: Source
    order: Order | None
    """None is a plain shuffle, or the stages of a curriculum."""
    validation: Source | None
    metrics: tuple[str, ...]
    frozen: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the frozen models, by name."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""
    on_engine_built: Callable[[TrainingPlan, Engine], TrainingPlan] | None = None
    """Returns the plan with what is known only from the built model, such as the hash of its base model."""
    on_train_start: TrainStartHook | None = None
    callbacks: tuple[Callback, ...] = ()
    """Further callbacks, on every process and before all others."""
    summarise: Callable[[dict[str, float]], dict[str, float]] = lambda metrics: metrics
    """Adds metrics that are derived from the means of an evaluation."""
    on_train_end: Callable[[RunDirectory, Console], None] | None = None
    """Called once after the last step, on the main process."""
    open_run: OpenRun | None = None
    """Opens a finished run by its directory, for a technique that depends on one."""

    @classmethod
    def from_workload(cls, workload: Workload, *, open_run: OpenRun | None = None) -> TrainingPlan:
        """Return the plan of a workload without techniques."""
        return cls(
            task=workload.task,
            training=workload.data.training(),
            order=workload.data.order,
            validation=workload.data.validation(),
            metrics=workload.metrics,
            frozen=workload.frozen_hashes,
            notes=tuple(workload.data.notes),
            open_run=open_run,
        )

    def complete(self, engine: Engine) -> TrainingPlan:
        """Return the plan once its engine is built."""
        return self.on_engine_built(self, engine) if self.on_engine_built is not None else self

    def with_engine_built_hook(self, hook: Callable[[TrainingPlan, Engine], TrainingPlan]) -> TrainingPlan:
        """Return the plan with one more `on_engine_built` hook, called after the others."""
        earlier_hook = self.on_engine_built

        def call_both(plan: TrainingPlan, engine: Engine) -> TrainingPlan:
            return hook(earlier_hook(plan, engine) if earlier_hook is not None else plan, engine)

        return replace(self, on_engine_built=call_both)

    def with_train_start_hook(self, hook: TrainStartHook) -> TrainingPlan:
        """Return the plan with one more `on_train_start` hook, called after the others."""
        earlier_hook = self.on_train_start

        def call_both(engine: Engine, loader: Loader, *, resumed: bool) -> None:
            if earlier_hook is not None:
                earlier_hook(engine, loader, resumed=resumed)
            hook(engine, loader, resumed=resumed)

        return replace(self, on_train_start=call_both)
