"""What is learned from what: all that a technique may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bottega.branches.branch import Branch
from bottega.core.task import Task
from bottega.data.loader import Loader
from bottega.data.orders import Order
from bottega.data.source import Source

if TYPE_CHECKING:
    from bottega.engines.torch import TorchEngine


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

    @classmethod
    def of(cls, branch: Branch) -> Lesson:
        return cls(
            task=branch.task,
            training=branch.training(),
            order=branch.order,
            validation=branch.validation(),
            metrics=branch.metrics,
            frozen=branch.frozen,
            notes=tuple(branch.notes),
        )
