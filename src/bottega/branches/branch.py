"""What the run asks of a branch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from bottega.core.task import Task
from bottega.data.orders import Order
from bottega.data.source import Source


class Branch(ABC):
    """A task with its data and codec. A reopened branch has no training data of its own until asked."""

    task: Task
    metrics: tuple[str, ...] = ("loss",)
    """What an evaluation measures."""
    unit: str = "samples"
    """What a second's work is counted in."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of the prepared data; a resumed run must find the same."""

    @abstractmethod
    def training(self) -> Source: ...

    @property
    def notes(self) -> list[str]:
        """What a person should know of the data: what was left out of it, and why."""
        return []

    @property
    def order(self) -> Order | None:
        """How several sources are mixed; None is the plain shuffle."""
        return None

    @abstractmethod
    def validation(self) -> Source | None: ...

    @abstractmethod
    def test(self) -> Source | None:
        """What the recipe sets aside for the end, never looked at while training."""

    @abstractmethod
    def other(self, path: str) -> Source:
        """Data given by hand to `evaluate`, seen through this run's codec."""

    @abstractmethod
    def save_codec(self, folder: Path) -> None: ...

    @abstractmethod
    def sample(self, model: Any, folder: Path, *, device: Any) -> None:
        """Draw what the recipe asks for and write it where a person would look."""

    @abstractmethod
    def generate(
        self, model: Any, prompts: list[str], *, device: Any, stream: TextIO | None, **options: Any
    ) -> list[str]: ...

    @abstractmethod
    def export(self, state: Mapping[str, Any], folder: Path) -> None:
        """The model in the layout of the ecosystem."""

    def summarise(self, metrics: dict[str, float]) -> dict[str, float]:
        return metrics
